#include "python/rdma.h"

#include <pybind11/stl.h>

#include "transport/rdma.h"
#include "transport/rdma_gpu.h"
#include "transport/transport.h"

namespace py = pybind11;

namespace dpp {

namespace {

py::list list_ports() {
  py::list result;
  for (const verbs::Port& port : verbs::list_ports(*verbs::Api::load())) {
    py::list addresses;
    for (const auto& address : port.addresses) {
      addresses.append(py::make_tuple(address.index, address.gid, address.kind));
    }
    py::dict entry;
    entry["device"] = port.device;
    entry["port"] = port.number;
    entry["active"] = port.active;
    entry["infiniband"] = port.infiniband;
    entry["dmabuf"] = port.dmabuf;
    entry["lid"] = port.lid;
    entry["mtu"] = port.mtu_bytes;
    entry["addresses"] = addresses;
    result.append(entry);
  }
  return result;
}

// Puts a link's senders and receivers into the transport; with a GPU's ordinal, for its tensors.
std::shared_ptr<RdmaLink> make_link(Transport& transport, int peer,
                                    const std::vector<size_t>& incoming,
                                    const std::vector<size_t>& outgoing, const RdmaPlace& place,
                                    int gpu, uint32_t max_pending) {
  std::vector<Geometry> in, out;
  for (const size_t index : incoming) in.push_back(transport.incoming(index));
  for (const size_t index : outgoing) out.push_back(transport.outgoing(index));
  auto link = std::make_shared<RdmaLink>(transport.find_peer(peer), transport.bell(),
                                         transport.copier(), place, in, out);
  const auto on_gpu = gpu < 0 ? nullptr : std::make_shared<RdmaGpu>(link, gpu);
  for (uint32_t i = 0; i < in.size(); ++i) {
    transport.set_receiver(
        incoming[i], peer,
        on_gpu ? on_gpu->make_receiver(i, in[i], on_gpu) : link->make_receiver(i));
  }
  for (uint32_t i = 0; i < out.size(); ++i) {
    transport.set_sender(
        outgoing[i], peer,
        on_gpu ? on_gpu->make_sender(i, max_pending, on_gpu) : link->make_sender(i));
  }
  transport.add_link(peer, link);
  return link;
}

py::dict offer(const RdmaLink& self) {
  const RdmaOffer& offer = self.offer();
  py::dict result;
  result["gid"] = offer.gid;
  result["lid"] = offer.lid;
  result["mtu"] = offer.mtu;
  result["address"] = offer.address;
  result["rkey"] = offer.rkey;
  result["queue_pairs"] = offer.queue_pairs;
  result["first_packets"] = offer.first_packets;
  return result;
}

void connect(RdmaLink& self, const py::dict& from) {
  RdmaOffer peer;
  peer.gid = from["gid"].cast<std::string>();
  peer.lid = from["lid"].cast<uint16_t>();
  peer.mtu = from["mtu"].cast<int>();
  peer.address = from["address"].cast<uint64_t>();
  peer.rkey = from["rkey"].cast<uint32_t>();
  peer.queue_pairs = from["queue_pairs"].cast<std::vector<uint32_t>>();
  peer.first_packets = from["first_packets"].cast<std::vector<uint32_t>>();
  self.connect(peer);
}

}  // namespace

void bind_rdma(py::module_& module) {
  module.def("rdma_ports", &list_ports,
             "Ports of all RDMA devices; TransportUnavailable without libibverbs.");
  py::class_<RdmaLink, std::shared_ptr<RdmaLink>>(module, "RdmaLink")
      .def(py::init([](Transport& transport, int peer, const std::vector<size_t>& incoming,
                       const std::vector<size_t>& outgoing, const std::string& device, uint8_t port,
                       uint32_t gid_index, uint64_t piece_bytes, int gpu, uint32_t max_pending) {
             return make_link(transport, peer, incoming, outgoing,
                              {device, port, gid_index, piece_bytes}, gpu, max_pending);
           }),
           py::keep_alive<1, 2>(), py::arg("transport"), py::arg("peer"), py::arg("incoming"),
           py::arg("outgoing"), py::kw_only(), py::arg("device"), py::arg("port"),
           py::arg("gid_index"), py::arg("piece_bytes"), py::arg("gpu"), py::arg("max_pending"))
      .def("offer", &offer)
      .def("connect", &connect);
}

}  // namespace dpp
