"""Settings of the dynamic pipeline, as a frozen dataclass that checks itself.

Command lines make their flags from its fields, so a default or a help text exists once.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import ipaddress
import math
import os
import pkgutil
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megatron.dpp.errors import ConfigError, Text, number_fault, setting

TRANSPORT_KINDS = (
    "auto",
    *sorted(m.name for m in pkgutil.iter_modules([str(Path(__file__).parent / "transport/kinds")])),
)
"""Values of ``transport``: ``auto``, and one per module of ``transport/kinds/``."""

KIND_PACKAGES = {"nixl": "pip install --no-deps nixl nixl-cu12 (or nixl-cu13)"}
"""Kinds that need the package of their name, with the command that installs it."""

EXTENSION = "_native"
"""Module of the transport that is built from ``csrc/``."""

CUDA_GRAPHS = ("auto", "on", "off")
"""Values of ``cuda_graphs``."""

FORWARD_ONLY_ORDERS = ("auto", "megatron", "dynamic")
"""Values of ``forward_only_order``."""

HEAD_IN_FORWARD = ("auto", "on", "off")
"""Values of ``head_in_forward``."""

SPLIT_BACKWARD = ("auto", "on", "off", "stock:N")
"""Values of ``split_backward``; N is a number of deferred backwards."""

ENGINE_ROWS = 128
"""Transformer Engine's attention (cuDNN 9.19) is right in CUDA graphs for sequences of multiples of
this; of 16 and 64 a replay accessed memory that is not its own.
"""

EIGHT_BIT_RECIPES = ("tensorwise", "blockwise")
"""Recipes of Transformer Engine whose 8-bit layers CUDA graphs capture: they compute their scales
anew in each task.
"""

GRAPHS_PAY_FROM = 0.75
"""Share of launching in the tasks' time from which ``cuda_graphs="auto"`` captures graphs."""
POOL_GROWTH = 2.0
"""Largest measured ratio of an activation's memory with graphs to that without."""

_BUCKETS_FROM, _BUCKET_RATIO = 256, math.sqrt(2.0)
"""First length and growth of geometric buckets: 20 % of padding for lengths of fine-tuning, and 13
lengths up to 16,384.
"""

GPUDIRECT = ("auto", "on", "off")
"""Values of ``gpudirect`` and ``rdma_adaptive_routing``."""

MOST_SLOTS = 1 << 20
LONGEST_WAIT = 2_000_000.0
"""Seconds, as many as the kernel counts in milliseconds."""

_RANGES = (
    ("slots", 1, MOST_SLOTS),
    ("max_tokens", 0, 1 << 40),
    ("workload", 1, 1 << 40),
    ("timeout", 0.001, LONGEST_WAIT),
    ("peer_timeout", 1.0, LONGEST_WAIT),
    ("lookahead", -1.0, 1e9),
    ("tcp_connections", 1, 16),
    ("rdma_traffic_class", 0, 255),
    ("rdma_service_level", 0, 15),
    ("rdma_pkey_index", 0, 65535),
    ("rdma_gid_index", -1, 255),
    ("rdma_timeout", 1, 31),
    ("rdma_retries", 0, 7),
)
"""Field, least and greatest value; a timeout of 0 would wait for ever."""


def missing_part(kind: str) -> str | None:
    """The error of a transport kind whose package or C++ extension is not there, else None."""
    if kind in KIND_PACKAGES and importlib.util.find_spec(kind) is None:
        transport = setting("transport", kind)
        return Text(
            f"{transport}: {sys.executable} has no package {kind}: {KIND_PACKAGES[kind]}, on "
            "every node",
            transport,
        )
    return missing_extension()


def missing_extension() -> str | None:
    """The error of an installation without the C++ extension for this Python, else None."""
    place = Path(__file__).parent / "transport"
    if importlib.machinery.PathFinder.find_spec(EXTENSION, [str(place)]) is not None:
        return None
    others = sorted(file.name for file in place.glob(f"{EXTENSION}*.so"))
    found = f" ({others[0]} is another Python's)" if others else ""
    root = Path(__file__).absolute().parents[2]
    command = (
        f"cd {root} && {sys.executable} setup.py build_ext --inplace (needs g++)"
        if (root / "setup.py").is_file()
        else f"{sys.executable} -m pip install --force-reinstall --no-deps WHEEL, with a wheel "
        "that has it (a clone's tools/build_wheel.sh)"
    )
    return (
        f"the C++ extension of the transport is not built for {sys.executable}{found}: {command}, "
        "on every node"
    )


class Backward(NamedTuple):
    """The way in which the backwards of a step run.

    Args:
        split: weight gradients may be tasks of their own.
        stock: deferred backwards from which a backward is fused, if no weight gradient of its chunk
            is deferred; infinity for never.
    """

    split: bool = True
    stock: float = math.inf

    @classmethod
    def of(cls, word: str) -> Backward | None:
        """The backward that a value of ``split_backward`` asks for; None for ``auto``.

        Raises:
            ValueError: it is none of :data:`SPLIT_BACKWARD`.
        """
        if word in ("on", "off"):
            return cls(split=word == "on")
        stock = re.fullmatch("stock:([0-9]{1,9})", str(word))
        if stock is None and word != "auto":
            raise ValueError(f"expected {', '.join(SPLIT_BACKWARD[:-1])} or {SPLIT_BACKWARD[-1]}")
        return None if stock is None else cls(stock=int(stock[1]))

    def __str__(self) -> str:
        if self.split:
            return "on" if math.isinf(self.stock) else f"stock:{self.stock:.0f}"
        return "off"


def _option(default: Any, help_text: str, needs: str = "dpp") -> Any:
    return field(default=default, metadata={"help": help_text, "needs": needs})


@dataclass(frozen=True, kw_only=True)
class DppConfig:
    """Settings of the dynamic pipeline and its transport. Command lines have a flag for each field
    (:mod:`megatron.dpp.naming`).
    """

    policy: str = _option(
        "auto",
        "which ready task runs next: {policies}, or your own as module:function; auto: megatron "
        "on two pipeline ranks, dynamic on more",
    )
    activation_cap: str = _option(
        "auto",
        "activations a rank may hold: auto, megatron (its worst rank's peak), static (and no more "
        "than its batches so far needed), strict (its peak rank by rank), a multiple of the "
        "pipeline size like 1.5p, longest sequences like 1.2seq, or bytes like 20GiB",
    )
    forward_only_order: str = _option(
        "auto",
        "order of forward-only steps over chunks: megatron (megatron-core's own), dynamic (what is "
        "ready), auto (megatron if the model replays its routing, dynamic otherwise)",
    )
    split_backward: str = _option(
        "auto",
        "run a layer's weight gradients apart from its input gradients, to fill waiting times: on, "
        "off, stock:N (unless N backwards wait for theirs, and none of the same chunk), auto "
        "(off where layers are recomputed whole, else chosen by what the first steps measure "
        "on a GPU, and on elsewhere)",
    )
    head_in_forward: str = _option(
        "auto",
        "run the backward of LM head and loss in the last chunk's forward, so that the logits of "
        "one microbatch exist at a time: on, off, auto (where several would exist otherwise: with "
        "{policy} breadth-first)",
    )
    slice_tokens: str = _option(
        "off",
        "cut each sequence into slices of so many tokens, which run through the pipeline as units "
        "of their own: off, auto (where that is simulated to gain, or needed), or a number",
    )
    transport: str = _option(
        "auto",
        "how tensors move between ranks: "
        + ", ".join(TRANSPORT_KINDS)
        + "; a kind that is not possible is an error",
        needs="stages",
    )
    slots: int = _option(2, "messages each channel can hold at the receiver", needs="links")
    max_tokens: int = _option(
        0,
        "tokens of the longest microbatch to come, for which links have room from the start; 0: as "
        "many as the longest sequence known has",
    )
    workload: int = _option(
        1 << 20, "elements per chunk where tensors are staged through host memory", needs="links"
    )
    gpudirect: str = _option(
        "auto",
        "between hosts with RDMA: let the network card read and write GPU memory itself: auto "
        "(where it can), on (an error where it cannot), off (through the host's memory)",
        needs="links",
    )
    rdma_devices: str | None = _option(
        None,
        "over rdma: ports to use, like mlx5_0,mlx5_3:1, or nearest for all of them; a GPU takes "
        "the nearest one on the PCI bus. By default all, unless {node_ips} has an address per "
        "rank; without a GPU, or with one card, the port with this host's address",
        needs="links",
    )
    rdma_traffic_class: int = _option(
        106, "over rdma: traffic class, 0 to 255, by which switches choose a queue", needs="links"
    )
    rdma_service_level: int = _option(
        0, "over rdma: service level, 0 to 15 (the priority on Ethernet)", needs="links"
    )
    rdma_pkey_index: int = _option(
        0, "over rdma: index of the partition key in the port's table", needs="links"
    )
    rdma_gid_index: int = _option(
        -1, "over rdma: index of the address in the port's table; -1 chooses it", needs="links"
    )
    rdma_timeout: int = _option(
        20, "over rdma: a packet is lost after 4.096 us times 2 to this power", needs="links"
    )
    rdma_retries: int = _option(
        7, "over rdma: times that a lost packet is sent again, 0 to 7", needs="links"
    )
    rdma_adaptive_routing: str = _option(
        "auto",
        "over rdma: the network may reorder packets, so that large data goes ahead of its notice: "
        "auto (on InfiniBand), on, off",
        needs="links",
    )
    timeout: float = _option(
        600.0, "seconds that a rank waits for a message before it gives up", needs="links"
    )
    lookahead: float = _option(
        -1.0,
        "on a GPU: milliseconds of the running task that may be left when the next task is "
        "chosen; -1 takes the time that launching a task takes",
    )
    launch_ahead: bool = _option(
        True,
        "on GPUs of one host: where nothing else may run, launch the task whose input is on its "
        "way, and let the device wait for it; not where whole backwards are fused",
    )
    cuda_graphs: str = _option(
        "auto",
        "on a GPU: capture each chunk's forward, backward and weight gradients once and replay "
        "them: auto (in the dynamic pipeline, where launching them takes nearly as long as running "
        "them), on (in static schedules, too), off",
        needs="nothing",
    )
    length_buckets: str = _option(
        "off",
        "pad sequences of unlike length to few lengths, for each of which CUDA graphs are "
        "captured: off, geometric (from 256, each 1.4 times the one before), or lengths like "
        "512,1024,4096",
        needs="nothing",
    )
    task_rng: bool = _option(
        True,
        "derive the random state of a task from seed, iteration, microbatch and stage, not from "
        "execution order",
        needs="stages",
    )
    node_ips: str | None = _option(
        None,
        "addresses (IPv4 or IPv6) that links between hosts are bound to, separated by commas: one "
        "per node, or one per rank",
        needs="nothing",  # launch scripts, which read the addresses, too, hand them to every run
    )
    listen_ports: str | None = _option(
        None,
        "ports like 29700-29763 that ranks listen on for links between hosts, one per rank of a "
        "host; by default any free one",
        needs="links",
    )
    tcp_connections: int = _option(
        4,
        "over tcp: connections of a link that carry tensors, 1 to 16; large messages are spread "
        "over them",
        needs="links",
    )
    checksum: bool = _option(False, "send a CRC32C with every message and check it", needs="links")
    peer_timeout: float = _option(
        30.0,
        "over tcp: seconds that a host may be out of reach before its ranks count as gone",
        needs="links",
    )
    token_file: str | None = _option(
        None,
        "file of mode 0600 with the job's secret (at least 16 bytes), on every node; by default "
        "DPP_TOKEN_FILE, else a random secret that torchrun's store passes between nodes",
        needs="links",
    )
    record: str | None = _option(
        None, "file that every scheduling decision is written to (one per rank: .rankN is added)"
    )
    replay: str | None = _option(None, "file written by {record} whose decisions are run again")
    inject: str | None = _option(
        None,
        "slow things down on purpose, for measurements: jitter:0.3, transient:2x:20%%, "
        "slow-rank:1:1.5, slow-link:0-1:5ms, lengths:0.5, head:1.5x",
        needs="nothing",
    )

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORT_KINDS:
            given = setting("transport", self.transport)
            raise ConfigError(f"{given}: expected one of {', '.join(TRANSPORT_KINDS)}", given)
        try:
            Backward.of(self.split_backward)
        except ValueError as error:
            given = setting("split_backward", self.split_backward)
            raise ConfigError(f"{given}: {error}", given) from None
        for name, values in (
            ("cuda_graphs", CUDA_GRAPHS),
            ("forward_only_order", FORWARD_ONLY_ORDERS),
            ("head_in_forward", HEAD_IN_FORWARD),
            ("gpudirect", GPUDIRECT),
            ("rdma_adaptive_routing", GPUDIRECT),
        ):
            if getattr(self, name) not in values:
                given = setting(name, getattr(self, name))
                raise ConfigError(f"{given}: expected one of {', '.join(values)}", given)
        if not re.fullmatch("off|auto|[1-9][0-9]{0,9}", self.slice_tokens):
            given = setting("slice_tokens", self.slice_tokens)
            raise ConfigError(f"{given}: expected off, auto, or a number of tokens", given)
        self.buckets(sys.maxsize)
        for name, least, most in _RANGES:
            value = getattr(self, name)
            if number_fault(value, least, most, whole=isinstance(least, int)):
                given = setting(name, value)
                raise ConfigError(f"{given}: must be from {least} to {most}", given)
        for address in self.node_ips.split(",") if self.node_ips else ():
            if fault := _fault_of_address(address):
                node_ips = setting("node_ips", self.node_ips)
                raise ConfigError(f"{node_ips}: {address!r} {fault}", node_ips)
        self.port_range()
        files = [os.path.realpath(each) for each in (self.record, self.replay) if each]
        if len(files) > len(set(files)):
            record, replay = setting("record", self.record), setting("replay", self.replay)
            raise ConfigError(
                f"{record} and {replay} name one file: a replay must not overwrite its source",
                record,
                replay,
            )

    def node_ip(self, rank: int, world_size: int, ranks_per_node: int) -> str | None:
        """The address of ``node_ips`` that a rank's links to other hosts are bound to.

        Raises:
            ConfigError: there is neither one address per node nor one per rank.
        """
        if not self.node_ips:
            return None
        addresses = [str(ipaddress.ip_address(one)) for one in self.node_ips.split(",")]
        if len(addresses) == world_size:
            return addresses[rank]
        num_nodes = -(-world_size // ranks_per_node)
        if len(addresses) == num_nodes:
            return addresses[rank // ranks_per_node]
        node_ips = setting("node_ips", self.node_ips)
        raise ConfigError(
            f"{node_ips} has {len(addresses)} addresses: expected one per node ({num_nodes}) or "
            f"one per rank ({world_size})",
            node_ips,
        )

    def buckets(self, longest: int, multiple: int = 1) -> tuple[int, ...]:
        """The lengths that ``length_buckets`` pads to, ascending; empty for ``off``. A sequence
        that is longer than the last one is not padded.

        Args:
            longest: tokens of the longest sequence, the last of geometric buckets.
            multiple: of which every length is a multiple.

        Raises:
            ConfigError: it is no list of ascending lengths up to ``longest``.
        """
        text, what = self.length_buckets, setting("length_buckets", self.length_buckets)
        if text == "off":
            return ()
        if text == "geometric":
            step, found, length = math.lcm(ENGINE_ROWS, multiple), [], float(_BUCKETS_FROM)
            while length < longest < sys.maxsize:
                found.append(math.ceil(round(length / step, 6)) * step)
                length *= _BUCKET_RATIO
            return (*dict.fromkeys(each for each in found if each < longest), longest)
        words = text.split(",")
        given = tuple(int(word) if re.fullmatch("[0-9]{1,11}", word) else 0 for word in words)
        if min(given) < 1 or list(given) != sorted(set(given)):
            raise ConfigError(
                f"{what}: expected off, geometric, or ascending lengths like 512,1024,4096", what
            )
        if given[-1] > longest:
            raise ConfigError(f"{what}: {given[-1]} is above the longest sequence, {longest}", what)
        if wrong := [length for length in given if length % multiple]:
            raise ConfigError(
                f"{what}: {wrong[0]} is no multiple of {multiple}, to which sequence and context "
                "parallelism pad rows",
                what,
            )
        return given

    def port_range(self) -> tuple[int, int] | None:
        """First and last port of ``listen_ports``; None without it.

        Raises:
            ConfigError: it is no range of ports.
        """
        if self.listen_ports is None:
            return None
        first, dash, last = self.listen_ports.partition("-")
        if first.isdecimal() and (last.isdecimal() or not dash):
            found = int(first), int(last or first)
            if 1 <= found[0] <= found[1] <= 65535:
                return found
        listen_ports = setting("listen_ports", self.listen_ports)
        raise ConfigError(
            f"{listen_ports}: expected two ports from 1 to 65535, the lower one first, like "
            "29700-29763",
            listen_ports,
        )


def _fault_of_address(text: str) -> str:
    """The reason why other hosts cannot reach this host at ``text``; empty if they may."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return "is not an IPv4 or IPv6 address"
    if isinstance(address, ipaddress.IPv6Address):
        if address.is_link_local or address.scope_id:  # a scope names an interface: "%eth0"
            return "is valid on one link only: give a routable address"
        if address.ipv4_mapped:
            return f"stands for an IPv4 address: give {address.ipv4_mapped}"
    if address.is_unspecified or address.is_multicast:
        return "is not the address of one host"
    return ""


def option_fields() -> tuple[dataclasses.Field[Any], ...]:
    """The fields of :class:`DppConfig` in the order in which flags are listed.

    ``metadata["help"]`` says what a field does; ``{policies}`` stands for the built-in policies'
    names, ``{FIELD}`` for the name of another field. ``metadata["needs"]`` is what a run with a
    static schedule must have for the field to take effect: ``dpp``, so it never does; ``links`` of
    ours (several stages and a ``transport``); ``stages``, several of them; or ``nothing``.
    """
    return dataclasses.fields(DppConfig)
