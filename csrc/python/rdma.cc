#include "python/rdma.h"

#include <pybind11/stl.h>

#include "transport/rdma.h"
#include "transport/rdma_gpu.h"
#include "transport/transport.h"

namespace py = pybind11;

namespace dpp {

namespace {

py::tuple list_ports() {
  py::list result;
  const verbs::Ports ports = verbs::list_ports(*verbs::Api::load());
  for (const verbs::Port& port : ports.found) {
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
  return py::make_tuple(result, ports.refused);
}

GpuDirectUse use_of(const std::string& word) {
  if (word == "off") return GpuDirectUse::kOff;
  return word == "on" ? GpuDirectUse::kOn : GpuDirectUse::kAuto;
}

RdmaLink::Test test_of(const std::string& word) {
  return word == "path" ? RdmaLink::Test::kPath : RdmaLink::Test::kSlots;
}

// A link, and how it serves the GPU: null without one.
struct MadeLink {
  std::shared_ptr<RdmaLink> link;
  std::shared_ptr<RdmaGpu> on_gpu;
};

// Puts a link's senders and receivers into the transport; with a GPU's ordinal, for its tensors.
MadeLink make_link(Transport& transport, int peer, const std::vector<size_t>& incoming,
                   const std::vector<size_t>& outgoing, const RdmaPlace& place, int gpu,
                   const std::string& gpudirect, uint32_t max_pending) {
  std::vector<ChannelSpec> in, out;
  for (const size_t index : incoming) in.push_back(transport.incoming(index));
  for (const size_t index : outgoing) out.push_back(transport.outgoing(index));
  const auto make = [&](std::shared_ptr<PayloadMemory> payloads) {
    return std::make_shared<RdmaLink>(transport.find_peer(peer), transport.bell(),
                                      transport.copier(), place, in, out, std::move(payloads));
  };
  const auto on_gpu = gpu < 0 ? nullptr : std::make_shared<RdmaGpu>(make, gpu, use_of(gpudirect));
  const auto link = on_gpu ? on_gpu->link() : make(nullptr);
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
  return {link, on_gpu};
}

py::dict offer(const MadeLink& self) {
  const RdmaOffer& offer = self.link->offer();
  py::dict result;
  result["gid"] = offer.gid;
  result["lid"] = offer.lid;
  result["mtu"] = offer.mtu;
  result["address"] = offer.address;
  result["rkey"] = offer.rkey;
  result["apart"] = offer.apart;
  result["payload_address"] = offer.payload_address;
  result["payload_rkey"] = offer.payload_rkey;
  result["queue_pairs"] = offer.queue_pairs;
  result["first_packets"] = offer.first_packets;
  return result;
}

void connect(const MadeLink& self, const py::dict& from) {
  RdmaOffer peer;
  peer.gid = from["gid"].cast<std::string>();
  peer.lid = from["lid"].cast<uint16_t>();
  peer.mtu = from["mtu"].cast<int>();
  peer.address = from["address"].cast<uint64_t>();
  peer.rkey = from["rkey"].cast<uint32_t>();
  peer.apart = from["apart"].cast<bool>();
  peer.payload_address = from["payload_address"].cast<uint64_t>();
  peer.payload_rkey = from["payload_rkey"].cast<uint32_t>();
  peer.queue_pairs = from["queue_pairs"].cast<std::vector<uint32_t>>();
  peer.first_packets = from["first_packets"].cast<std::vector<uint32_t>>();
  const py::gil_scoped_release others_run;
  self.link->connect(peer);
}

py::dict attributes(const MadeLink& self) {
  const verbs::QueuePairAttributes found = self.link->attributes();
  py::dict result;
  result["gid_index"] = found.path.route.source_gid_index;
  result["traffic_class"] = found.path.route.traffic_class;
  result["service_level"] = found.path.service_level;
  result["pkey_index"] = found.pkey_index;
  result["timeout"] = found.timeout;
  result["retries"] = found.retries;
  return result;
}

}  // namespace

void bind_rdma(py::module_& module) {
  module.def("rdma_ports", &list_ports,
             "Ports of all RDMA devices, and why some devices could not be opened; "
             "TransportUnavailable without libibverbs.");
  module.def("probe_gpu_direct", &probe_gpu_direct, py::arg("rdma_device"), py::arg("gpu"),
             "(whether, how or why not) memory of a GPU can be registered with an RDMA device.");
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<MadeLink>(module, "RdmaLink")
      .def(py::init([](Transport& transport, int peer, const std::vector<size_t>& incoming,
                       const std::vector<size_t>& outgoing, const std::string& device, uint8_t port,
                       uint32_t gid_index, uint8_t traffic_class, uint8_t service_level,
                       uint16_t pkey_index, uint8_t timeout, uint8_t retries, bool adaptive_routing,
                       uint64_t piece_bytes, int gpu, const std::string& gpudirect,
                       uint32_t max_pending) {
             const py::gil_scoped_release others_run;  // the pages of all slots are registered
             return make_link(transport, peer, incoming, outgoing,
                              {device, port, gid_index, traffic_class, service_level, pkey_index,
                               timeout, retries, adaptive_routing, piece_bytes},
                              gpu, gpudirect, max_pending);
           }),
           py::keep_alive<1, 2>(), py::arg("transport"), py::arg("peer"), py::arg("incoming"),
           py::arg("outgoing"), py::kw_only(), py::arg("device"), py::arg("port"),
           py::arg("gid_index"), py::arg("traffic_class"), py::arg("service_level"),
           py::arg("pkey_index"), py::arg("timeout"), py::arg("retries"),
           py::arg("adaptive_routing"), py::arg("piece_bytes"), py::arg("gpu"),
           py::arg("gpudirect"), py::arg("max_pending"))
      .def_property_readonly(
          "gpu_way", [](const MadeLink& self) { return self.on_gpu ? self.on_gpu->way() : ""; },
          "How GPU tensors travel, and why; empty without a GPU.")
      .def("offer", &offer)
      .def("connect", &connect)
      .def("attributes", &attributes, "Settings of a connected queue pair, as the device has them.")
      .def_property_readonly(
          "in_host_memory", [](const MadeLink& self) { return self.link->side_by_side(); },
          "Whether neither side's payloads lie in a GPU's memory.")
      .def(
          "post_pattern",
          [](const MadeLink& self, const std::string& test, uint64_t seed) {
            self.link->post_pattern(test_of(test), seed);
          },
          no_gil)
      .def(
          "await_pattern",
          [](const MadeLink& self, double seconds) {
            return self.link->await_pattern(monotonic_ns() + static_cast<uint64_t>(seconds * 1e9));
          },
          no_gil)
      .def(
          "pattern_fault",
          [](const MadeLink& self, const std::string& test, uint64_t seed) {
            return self.link->pattern_fault(test_of(test), seed);
          },
          no_gil);
}

}  // namespace dpp
