"""A section of the settings, which ``cli.write_sections`` writes."""

from __future__ import annotations

from megatron.dpp_train.options.section import Section


class Pipeline(Section):
    """The dynamic pipeline: schedule, transport, plan, device."""

    use_dpp: bool = False
    dpp_plan: str | None = None
    device: str = "auto"
    forward_backward_disaggregating: bool = False
    ignore_forward_tensor_parallel: bool = False
    num_gpus: int | None = None
    multi_node: bool = False
    dpp_policy: str = "auto"
    dpp_activation_cap: str = "auto"
    dpp_forward_only_order: str = "auto"
    dpp_split_backward: str = "auto"
    dpp_head_in_forward: str = "auto"
    dpp_slice_tokens: str = "off"
    dpp_transport: str = "auto"
    dpp_slots: int = 2
    dpp_max_tokens: int = 0
    dpp_workload: int = 1048576
    dpp_gpudirect: str = "auto"
    dpp_rdma_devices: str | None = None
    dpp_rdma_traffic_class: int = 106
    dpp_rdma_service_level: int = 0
    dpp_rdma_pkey_index: int = 0
    dpp_rdma_gid_index: int = -1
    dpp_rdma_timeout: int = 20
    dpp_rdma_retries: int = 7
    dpp_rdma_adaptive_routing: str = "auto"
    dpp_timeout: float = 600.0
    dpp_lookahead: float = -1.0
    dpp_launch_ahead: bool = True
    dpp_cuda_graphs: str = "auto"
    dpp_length_buckets: str = "off"
    dpp_task_rng: bool = True
    dpp_node_ips: str | None = None
    dpp_listen_ports: str | None = None
    dpp_tcp_connections: int = 4
    dpp_checksum: bool = False
    dpp_peer_timeout: float = 30.0
    dpp_token_file: str | None = None
    dpp_record: str | None = None
    dpp_replay: str | None = None
    dpp_inject: str | None = None
