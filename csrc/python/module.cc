// The binding: what Python calls, in lambdas of a few lines. Objects here are thin; dpp::Transport
// does the work.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>

#include "base/memory_room.h"
#include "python/cuda.h"
#include "python/rdma.h"
#include "transport/transport.h"

namespace py = pybind11;

namespace {

using dpp::ChannelSpec;
using dpp::Error;
using dpp::Fault;
using dpp::Transport;
using dpp::UniqueFd;

constexpr uint64_t kHoldGilBytes = 256 << 10;  // below, a copy is shorter than giving the lock away
constexpr uint64_t kSignalSliceNs = 200'000'000;

const char* class_of(Fault fault) {
  switch (fault) {
    case Fault::kSetup: return "SetupError";
    case Fault::kUnavailable: return "TransportUnavailable";
    case Fault::kPeerDead: return "PeerDead";
    case Fault::kTimeout: return "TransferTimeout";
    case Fault::kProtocol: return "ProtocolError";
    case Fault::kForked: return "UsedAfterFork";
    case Fault::kNone: break;
  }
  return "TransportError";
}

// A peer's text need not be UTF-8: an error about it must not take the place of the failure.
py::str text_of(const std::string& text) {
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<py::ssize_t>(text.size()), "replace"));
}

// As above, for text of Python, which may hold a path's bytes that are no characters.
std::string bytes_of(const py::str& text) {
  return py::bytes(text.attr("encode")("utf-8", "backslashreplace"));
}

// The settings that a text of this library names.
py::list named_in(const std::string& text, const py::object& setting) {
  const std::pair<const char*, const char*> all[] = {
      {"slots", ""}, {"timeout", ""}, {"node_ips", ""}, {"gpudirect", "on"}, {"gpudirect", "off"}};
  py::list named;
  for (const auto& [name, value] : all) {
    if (text.find(dpp::setting(name, value)) == std::string::npos) continue;
    named.append(*value ? setting(name, value) : setting(name));
  }
  return named;
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const Error& error) {
    const py::module_ errors = py::module_::import("megatron.dpp.errors");
    const py::object type = errors.attr(class_of(error.fault()));
    const py::list named = named_in(error.what(), errors.attr("setting"));
    PyErr_SetObject(type.ptr(), type(text_of(error.what()), *named).ptr());
  }
}

ChannelSpec spec_of(const py::tuple& fields) {
  ChannelSpec spec;
  spec.source = fields[0].cast<int32_t>();
  spec.destination = fields[1].cast<int32_t>();
  spec.chunk = fields[2].cast<int32_t>();
  spec.direction = fields[3].cast<int32_t>();
  spec.slot_bytes = fields[4].cast<uint64_t>();
  spec.depth = fields[5].cast<uint32_t>();
  return spec;
}

std::vector<ChannelSpec> specs_of(const std::vector<py::tuple>& channels) {
  std::vector<ChannelSpec> result;
  for (const py::tuple& fields : channels) result.push_back(spec_of(fields));
  return result;
}

std::unique_ptr<Transport> make_transport(int rank, double timeout, bool checksum,
                                          uint32_t max_pending, bool spin,
                                          const std::vector<py::tuple>& incoming,
                                          const std::vector<py::tuple>& outgoing) {
  dpp::Settings settings;
  settings.rank = rank;
  settings.timeout_ns = static_cast<uint64_t>(timeout * 1e9);
  settings.checksum = checksum;
  settings.max_pending = max_pending;
  settings.spin = spin;
  const std::vector<ChannelSpec> in = specs_of(incoming), out = specs_of(outgoing);
  const py::gil_scoped_release others_run;  // ways to copy are measured
  return std::make_unique<Transport>(settings, in, out);
}

dpp::Outgoing::Put put_once(Transport& self, size_t channel, const dpp::Parcel& parcel) {
  if (parcel.header.bytes <= kHoldGilBytes) return self.put(channel, parcel);
  const py::gil_scoped_release release;
  return self.put(channel, parcel);
}

// In slices, so that an interrupt from the keyboard is heard.
void wait_for_room(Transport& self, size_t channel, uint64_t since_ns) {
  while (true) {
    {
      const py::gil_scoped_release release;
      if (self.wait_for_room(channel, since_ns, kSignalSliceNs)) return;
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
}

// Returns whether the message is still pending, that is, whether the tensor must be kept alive.
bool put(Transport& self, size_t channel, uintptr_t data, uint64_t bytes, uint8_t dtype,
         const py::tuple& shape, int64_t iteration, int64_t microbatch, uint32_t part,
         uint32_t num_parts, uintptr_t stream) {
  dpp::Parcel parcel;
  parcel.data = reinterpret_cast<const void*>(data);
  parcel.stream = stream;
  dpp::Header& header = parcel.header;
  header.bytes = bytes;
  header.dtype = dtype;
  if (shape.size() > dpp::kMaxDims) throw py::value_error("a tensor with more than 8 dimensions");
  header.num_dims = static_cast<uint8_t>(shape.size());
  for (size_t i = 0; i < shape.size(); ++i) header.shape[i] = shape[i].cast<uint64_t>();
  header.iteration = iteration;
  header.microbatch = microbatch;
  header.part = part;
  header.num_parts = num_parts;
  dpp::Outgoing::Put result = put_once(self, channel, parcel);
  if (result == dpp::Outgoing::Put::kFull) {
    const uint64_t since = dpp::monotonic_ns();
    do {
      wait_for_room(self, channel, since);
      result = put_once(self, channel, parcel);
    } while (result == dpp::Outgoing::Put::kFull);
  }
  return result != dpp::Outgoing::Put::kDone;
}

py::list counted(Transport& self, size_t count, void (Transport::*look)(uint64_t*)) {
  std::array<uint64_t, 64> few;
  std::vector<uint64_t> many(count > few.size() ? count : 0);
  uint64_t* totals = many.empty() ? few.data() : many.data();
  (self.*look)(totals);
  py::list result(count);
  for (size_t i = 0; i < count; ++i) result[i] = totals[i];
  return result;
}

py::list poll(Transport& self, size_t count) { return counted(self, count, &Transport::poll); }
py::list coming(Transport& self, size_t count) { return counted(self, count, &Transport::coming); }

py::tuple head(Transport& self, size_t channel) {
  uint64_t arrived_ns = 0;
  const dpp::Header& header = self.head(channel, arrived_ns);
  py::tuple shape(header.num_dims), strides(header.num_dims);
  uint64_t stride = 1;
  for (size_t i = header.num_dims; i-- != 0;) {
    shape[i] = header.shape[i];
    strides[i] = stride;
    stride *= std::max<uint64_t>(1, header.shape[i]);
  }
  return py::make_tuple(header.dtype, shape, strides, header.bytes, header.iteration,
                        header.microbatch, header.part, header.num_parts, header.sent_ns,
                        arrived_ns);
}

void take(Transport& self, size_t channel, uintptr_t to, uint64_t bytes, uintptr_t stream) {
  if (bytes <= kHoldGilBytes) return self.take(channel, reinterpret_cast<void*>(to), bytes, stream);
  const py::gil_scoped_release release;
  self.take(channel, reinterpret_cast<void*>(to), bytes, stream);
}

// The memory of a message that was taken: a buffer, to which a tensor refers.
struct Payload {
  dpp::Block memory;
  uint64_t bytes;
};

std::optional<Payload> take_memory(Transport& self, size_t channel, uint64_t bytes) {
  dpp::Block memory;
  {
    const py::gil_scoped_release release;
    memory = self.take_memory(channel);
  }
  if (!memory) return std::nullopt;
  return Payload{std::move(memory), bytes};
}

// In slices, so that an interrupt from the keyboard is heard.
bool wait(Transport& self, double seconds) {
  uint64_t left = static_cast<uint64_t>(std::max(0.0, std::min(seconds, 1e9)) * 1e9);
  while (true) {
    const uint64_t slice = std::min(left, kSignalSliceNs);
    {
      const py::gil_scoped_release release;
      if (self.wait(slice)) return true;
    }
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if ((left -= slice) == 0) return false;
  }
}

void board_post(Transport& self, const std::vector<uint64_t>& counters) {
  if (counters.size() != self.board().num_counters())
    throw py::value_error("wrong number of board counters");
  self.board_post(counters.data());
}

std::vector<uint64_t> board_common(Transport& self) {
  const dpp::Board& board = self.board();
  std::vector<uint64_t> counters(board.num_counters());
  board.common(counters.data());
  return counters;
}

void add_peer(Transport& self, int rank, std::string description, int socket, int pidfd, int bell) {
  self.add_peer(rank, std::move(description), UniqueFd(socket), UniqueFd(pidfd), UniqueFd(bell));
}

void add_tcp_link(Transport& self, int peer, const std::vector<size_t>& incoming,
                  const std::vector<size_t>& outgoing, const std::vector<int>& sockets) {
  std::vector<UniqueFd> owned;
  for (const int socket : sockets) owned.emplace_back(socket);
  const py::gil_scoped_release others_run;  // the pages of all slots are made
  self.add_tcp_link(peer, incoming, outgoing, std::move(owned));
}

void abort_run(Transport& self, const py::str& reason) {
  const std::string text = bytes_of(reason);
  const py::gil_scoped_release release;
  self.abort(text);
}

py::object memory_room(const std::string& groups, const std::string& mount, size_t free_swap) {
  const dpp::MemoryRoom room = dpp::memory_room(groups, mount, free_swap);
  if (room.limit.empty()) return py::none();
  return py::make_tuple(room.bytes, room.limit);
}

void use_board(Transport& self, int fd, uint32_t index, uint32_t lines, uint32_t counters, int head,
               bool relayed) {
  self.use_board(UniqueFd(fd), index, lines, counters, head, relayed);
}

std::optional<std::pair<int64_t, int64_t>> last_taken(const Transport& self, size_t channel) {
  const dpp::Header* header = self.last_taken(channel);
  if (header == nullptr) return std::nullopt;
  return std::make_pair(header->iteration, header->microbatch);
}

std::optional<uint64_t> board_next(Transport& self) {
  uint64_t word = 0;
  if (!self.board_next(word)) return std::nullopt;
  return word;
}

}  // namespace

PYBIND11_MODULE(_native, module) {
  module.doc() =
      "The C++ side of megatron.dpp.transport; see csrc/transport/transport.h for contracts.";
  py::register_local_exception_translator(translate);
  module.attr("abi_version") = dpp::kAbiVersion;
  module.attr("max_dims") = dpp::kMaxDims;
  module.attr("least_handed_over") = dpp::kLeastHandedOver;
  py::list dtypes;
  for (const dpp::DtypeInfo& dtype : dpp::kDtypes) dtypes.append(dtype.name);
  module.attr("dtype_names") = dtypes;
  module.def("memory_room", &memory_room, py::arg("groups"), py::arg("mount"), py::arg("free_swap"),
             "(bytes left, which limit leaves them) by control groups; None without a limit.");

  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<Payload>(module, "Payload", py::buffer_protocol()).def_buffer([](Payload& self) {
    return py::buffer_info(reinterpret_cast<uint8_t*>(self.memory.get()),
                           static_cast<py::ssize_t>(self.bytes));
  });
  py::class_<Transport>(module, "Transport")
      .def(py::init(&make_transport), py::kw_only(), py::arg("rank"), py::arg("timeout"),
           py::arg("checksum"), py::arg("max_pending"), py::arg("spin"), py::arg("incoming"),
           py::arg("outgoing"))
      .def("bell_fd", &Transport::bell_fd)
      .def("add_peer", &add_peer,
           "Owns the descriptors from here on; -1 for one that is not there.")
      .def("make_shm_slots", &Transport::make_shm_slots, no_gil)
      .def("use_shm_slots", [](Transport& self, int peer, const std::vector<size_t>& channels,
                               int fd) { self.use_shm_slots(peer, channels, UniqueFd(fd)); })
      .def("add_tcp_link", &add_tcp_link, "Owns the sockets from here on.")
      .def("drop_link", &Transport::drop_link, no_gil)
      .def("describe_peer", &Transport::describe_peer)
      .def("make_board", &Transport::make_board)
      .def("use_board", &use_board)
      .def("start", &Transport::start)
      .def("put", &put)
      .def("done", &Transport::done)
      .def("num_puts", &Transport::num_puts)
      .def("pending", &Transport::pending)
      .def("poll", &poll)
      .def("coming", &coming)
      .def("head", &head)
      .def("take", &take)
      .def("take_memory", &take_memory, "None, and nothing is taken, where take() has to copy.")
      .def("wait", &wait)
      .def("ring", &Transport::ring)
      .def("check", &Transport::check)
      .def("failure", [](Transport& self) { return text_of(self.failure()); })
      .def("board_post", &board_post)
      .def("board_common", &board_common)
      .def("board_append", &Transport::board_append, no_gil)
      .def("board_next", &board_next)
      .def("departed", &Transport::departed)
      .def("silence", &Transport::silence)
      .def("last_taken", &last_taken, "(iteration, microbatch), or None.")
      .def("abort", &abort_run)
      .def("close", &Transport::close, no_gil)
      .def("disown", &Transport::disown);
  dpp::bind_cuda(module);
  dpp::bind_rdma(module);
}
