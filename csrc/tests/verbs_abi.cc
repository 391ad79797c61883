// Compares base/verbs.h with the header of libibverbs; compiling it is the test.
#include <infiniband/verbs.h>

#include "base/verbs.h"

using namespace dpp::verbs;

// The header has an enum for each of these numbers, ours are plain constants.
#pragma GCC diagnostic ignored "-Wenum-compare"

#define SAME_SIZE(ours, theirs) static_assert(sizeof(ours) == sizeof(theirs), #theirs)
#define SAME_PLACE(ours, member, theirs, their_member)                              \
  static_assert(offsetof(ours, member) == offsetof(theirs, their_member), #theirs); \
  static_assert(sizeof(ours::member) == sizeof(theirs::their_member), #theirs)

SAME_SIZE(GidEntry, ibv_gid_entry);
SAME_PLACE(GidEntry, type, ibv_gid_entry, gid_type);
// Newer headers append to it; ibv_query_port of the library fills what all of them have.
static_assert(sizeof(PortAttributes) <= sizeof(ibv_port_attr));
SAME_PLACE(PortAttributes, state, ibv_port_attr, state);
SAME_PLACE(PortAttributes, active_mtu, ibv_port_attr, active_mtu);
SAME_PLACE(PortAttributes, num_gids, ibv_port_attr, gid_tbl_len);
SAME_PLACE(PortAttributes, lid, ibv_port_attr, lid);
SAME_PLACE(PortAttributes, link_layer, ibv_port_attr, link_layer);
SAME_SIZE(CompletionChannel, ibv_comp_channel);
SAME_PLACE(CompletionChannel, fd, ibv_comp_channel, fd);
SAME_SIZE(CompletionQueue, ibv_cq);
SAME_SIZE(MemoryRegion, ibv_mr);
SAME_PLACE(MemoryRegion, lkey, ibv_mr, lkey);
SAME_PLACE(MemoryRegion, rkey, ibv_mr, rkey);
SAME_SIZE(QueuePair, ibv_qp);
SAME_PLACE(QueuePair, number, ibv_qp, qp_num);
SAME_SIZE(QueuePairLimits, ibv_qp_cap);
SAME_SIZE(QueuePairSettings, ibv_qp_init_attr);
SAME_PLACE(QueuePairSettings, limits, ibv_qp_init_attr, cap);
SAME_PLACE(QueuePairSettings, type, ibv_qp_init_attr, qp_type);
SAME_SIZE(Path, ibv_ah_attr);
SAME_PLACE(Path, lid, ibv_ah_attr, dlid);
SAME_PLACE(Path, has_route, ibv_ah_attr, is_global);
SAME_PLACE(Path, port, ibv_ah_attr, port_num);
SAME_PLACE(Path, route.source_gid_index, ibv_ah_attr, grh.sgid_index);
SAME_PLACE(Path, route.hop_limit, ibv_ah_attr, grh.hop_limit);
SAME_SIZE(QueuePairAttributes, ibv_qp_attr);
SAME_PLACE(QueuePairAttributes, mtu, ibv_qp_attr, path_mtu);
SAME_PLACE(QueuePairAttributes, receive_psn, ibv_qp_attr, rq_psn);
SAME_PLACE(QueuePairAttributes, send_psn, ibv_qp_attr, sq_psn);
SAME_PLACE(QueuePairAttributes, peer_number, ibv_qp_attr, dest_qp_num);
SAME_PLACE(QueuePairAttributes, access, ibv_qp_attr, qp_access_flags);
SAME_PLACE(QueuePairAttributes, path, ibv_qp_attr, ah_attr);
SAME_PLACE(QueuePairAttributes, max_reads, ibv_qp_attr, max_rd_atomic);
SAME_PLACE(QueuePairAttributes, max_peer_reads, ibv_qp_attr, max_dest_rd_atomic);
SAME_PLACE(QueuePairAttributes, min_rnr_timer, ibv_qp_attr, min_rnr_timer);
SAME_PLACE(QueuePairAttributes, port, ibv_qp_attr, port_num);
SAME_PLACE(QueuePairAttributes, pkey_index, ibv_qp_attr, pkey_index);
SAME_PLACE(QueuePairAttributes, timeout, ibv_qp_attr, timeout);
SAME_PLACE(QueuePairAttributes, retries, ibv_qp_attr, retry_cnt);
SAME_PLACE(QueuePairAttributes, rnr_retries, ibv_qp_attr, rnr_retry);
SAME_SIZE(Piece, ibv_sge);
SAME_PLACE(Piece, lkey, ibv_sge, lkey);
SAME_SIZE(SendRequest, ibv_send_wr);
SAME_PLACE(SendRequest, opcode, ibv_send_wr, opcode);
SAME_PLACE(SendRequest, flags, ibv_send_wr, send_flags);
SAME_PLACE(SendRequest, immediate, ibv_send_wr, imm_data);
SAME_PLACE(SendRequest, remote.address, ibv_send_wr, wr.rdma.remote_addr);
SAME_PLACE(SendRequest, remote.rkey, ibv_send_wr, wr.rdma.rkey);
SAME_SIZE(ReceiveRequest, ibv_recv_wr);
SAME_SIZE(Completion, ibv_wc);
SAME_PLACE(Completion, status, ibv_wc, status);
SAME_PLACE(Completion, opcode, ibv_wc, opcode);
SAME_PLACE(Completion, immediate, ibv_wc, imm_data);
SAME_PLACE(Completion, queue_pair, ibv_wc, qp_num);
SAME_SIZE(AsyncEvent, ibv_async_event);
SAME_PLACE(AsyncEvent, type, ibv_async_event, event_type);
SAME_SIZE(Context, ibv_context);
SAME_PLACE(Context, calls.poll, ibv_context, ops.poll_cq);
SAME_PLACE(Context, calls.notify, ibv_context, ops.req_notify_cq);
SAME_PLACE(Context, calls.post_send, ibv_context, ops.post_send);
SAME_PLACE(Context, calls.post_receive, ibv_context, ops.post_recv);
SAME_PLACE(Context, async_fd, ibv_context, async_fd);

static_assert(kGidRoceV1 == IBV_GID_TYPE_ROCE_V1 && kGidRoceV2 == IBV_GID_TYPE_ROCE_V2);
static_assert(kPortActive == IBV_PORT_ACTIVE && kLinkInfiniband == IBV_LINK_LAYER_INFINIBAND);
static_assert(kLinkEthernet == IBV_LINK_LAYER_ETHERNET && kReliableConnection == IBV_QPT_RC);
static_assert(kStateInit == IBV_QPS_INIT && kStateReadyToReceive == IBV_QPS_RTR);
static_assert(kStateReadyToSend == IBV_QPS_RTS);
static_assert(kHasState == IBV_QP_STATE && kHasAccess == IBV_QP_ACCESS_FLAGS);
static_assert(kHasPkey == IBV_QP_PKEY_INDEX && kHasPort == IBV_QP_PORT && kHasPath == IBV_QP_AV);
static_assert(kHasMtu == IBV_QP_PATH_MTU && kHasTimeout == IBV_QP_TIMEOUT);
static_assert(kHasRetries == IBV_QP_RETRY_CNT && kHasRnrRetries == IBV_QP_RNR_RETRY);
static_assert(kHasReceivePsn == IBV_QP_RQ_PSN && kHasMaxReads == IBV_QP_MAX_QP_RD_ATOMIC);
static_assert(kHasMinRnrTimer == IBV_QP_MIN_RNR_TIMER && kHasSendPsn == IBV_QP_SQ_PSN);
static_assert(kHasMaxPeerReads == IBV_QP_MAX_DEST_RD_ATOMIC && kHasPeer == IBV_QP_DEST_QPN);
static_assert(kLocalWrite == IBV_ACCESS_LOCAL_WRITE && kRemoteWrite == IBV_ACCESS_REMOTE_WRITE);
static_assert(kRelaxedOrdering == IBV_ACCESS_RELAXED_ORDERING);
static_assert(kWrite == IBV_WR_RDMA_WRITE && kWriteWithImmediate == IBV_WR_RDMA_WRITE_WITH_IMM);
static_assert(kSignaled == IBV_SEND_SIGNALED && kReceivedImmediate == IBV_WC_RECV_RDMA_WITH_IMM);
static_assert(kFlushed == IBV_WC_WR_FLUSH_ERR && kRemoteInvalid == IBV_WC_REM_INV_REQ_ERR);
static_assert(kRemoteAccess == IBV_WC_REM_ACCESS_ERR && kRemoteOperation == IBV_WC_REM_OP_ERR);
static_assert(kRetriesExceeded == IBV_WC_RETRY_EXC_ERR);
static_assert(kNeedsRoute == IBV_QPF_GRH_REQUIRED);
static_assert(kReceiverNotReady == IBV_WC_RNR_RETRY_EXC_ERR);
static_assert(kResponseTimeout == IBV_WC_RESP_TIMEOUT_ERR);
static_assert(kPortActiveEvent == IBV_EVENT_PORT_ACTIVE && kPortErrorEvent == IBV_EVENT_PORT_ERR);
static_assert(kDeviceFatalEvent == IBV_EVENT_DEVICE_FATAL);
