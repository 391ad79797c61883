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

POLICIES = ("auto", "dynamic", "depth-first", "breadth-first", "megatron", "eager")
"""Built-in values of ``policy``."""

SPLIT_BACKWARD = ("auto", "on", "off", "stock:N")
"""Values of ``split_backward``; N is a number of deferred backwards."""

ENGINE_ROWS = 128
"""Transformer Engine's attention (cuDNN 9.19) is right in CUDA graphs for sequences of multiples of
this; of 16 and 64 a replay accessed memory that is not its own.
"""

EIGHT_BIT_RECIPES = ("tensorwise", "blockwise", "delayed")
"""Recipes of Transformer Engine whose 8-bit layers CUDA graphs capture: their scales are computed
within each task.
"""

GRAPHS_PAY_FROM = 0.5
"""Share of launching in the tasks' time from which ``cuda_graphs="auto"`` captures graphs."""
POOL_GROWTH = 2.0
"""Largest measured ratio of an activation's memory with graphs to that without."""

_BUCKETS_FROM, _BUCKET_RATIO = 256, math.sqrt(2.0)
"""First length and growth of geometric buckets: 20 % of padding for lengths of fine-tuning, and 13
lengths up to 16,384.
"""

GPUDIRECT = ("auto", "on", "off")
"""Values of ``gpudirect``."""

MOST_SLOTS = 1 << 20
LONGEST_WAIT = 2_000_000.0
"""Seconds, as many as the kernel counts in milliseconds."""


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


def _option(default: Any, section: str, help_text: str, *allowed: Any) -> Any:
    """A field with its words, or its least and its greatest value; without either, any value."""
    return field(default=default, metadata={"section": section, "help": help_text, "of": allowed})


_SCHEDULE, _GRAPHS, _LINKS, _STUDY = "schedule", "CUDA graphs", "links", "recordings and delays"
"""Sections of :class:`DppConfig`, in which help and pages list its fields."""


@dataclass(frozen=True, kw_only=True)
class DppConfig:
    """Settings of the dynamic pipeline and its transport. Command lines have a flag for each field
    (:mod:`megatron.dpp.command_line`).
    """

    policy: str = _option(
        "auto",
        _SCHEDULE,
        f"which ready task runs next: {', '.join(POLICIES)}, or your own as module:function; "
        "auto: megatron, with one chunk per rank eager, where lengths are far apart on more than "
        "two ranks dynamic, or megatron-core's own schedule where it wins a race of whole steps",
    )
    activation_cap: str = _option(
        "auto",
        _SCHEDULE,
        "activations a rank may hold: auto, megatron (its worst rank's peak), static (and no more "
        "than its batches so far needed), strict (its peak rank by rank), a multiple of the "
        "pipeline size like 1.5p, longest sequences like 1.2seq, or bytes like 20GiB",
    )
    split_backward: str = _option(
        "auto",
        _SCHEDULE,
        "run a layer's weight gradients apart from its input gradients, to fill waiting times: on, "
        "off, stock:N (unless N backwards wait for theirs, and none of the same chunk), auto "
        "(off where layers are recomputed whole, else the winner of a race of whole steps)",
    )
    head_in_forward: str = _option(
        "auto",
        _SCHEDULE,
        "run the backward of LM head and loss in the last chunk's forward, so that the logits of "
        "one microbatch exist at a time: on, off, auto (where several would exist otherwise: with "
        "{policy} breadth-first)",
        *("auto", "on", "off"),
    )
    slice_tokens: int = _option(
        0,
        _SCHEDULE,
        "cut each sequence into slices of so many tokens, which run through the pipeline as units "
        "of their own; 0: cut none",
        *(0, 1 << 40),
    )
    max_tokens: int = _option(
        0,
        _SCHEDULE,
        "tokens of the longest microbatch to come, for which links have room from the start; 0: as "
        "many as the longest sequence known has",
        *(0, 1 << 40),
    )
    call_order: str = _option(
        "auto",
        _SCHEDULE,
        "order in which forward steps are called: megatron (as megatron-core calls them), dynamic "
        "(in forward-only steps over chunks what is ready), planned (also, where microbatches are "
        "unlike, training's in the order that is fastest by simulation), auto (dynamic, but "
        "megatron if the model replays its routing)",
        *("auto", "megatron", "dynamic", "planned"),
    )
    task_rng: bool = _option(
        True,
        _SCHEDULE,
        "derive the random state of a task from seed, iteration, microbatch and stage, not from "
        "execution order",
    )
    cuda_graphs: str = _option(
        "auto",
        _GRAPHS,
        "on a GPU: capture each chunk's forward, backward and weight gradients once and replay "
        "them: auto (where launching them takes nearly as long as running them), on, off",
        *("auto", "on", "off"),
    )
    length_buckets: str = _option(
        "auto",
        _GRAPHS,
        "pad rows of unlike length to few lengths, for each of which CUDA graphs are captured: "
        "off, geometric (from 256, each 1.4 times the one before), lengths like 512,1024,4096, "
        "auto (geometric where graphs are captured, but not in deterministic runs)",
    )
    transport: str = _option(
        "auto",
        _LINKS,
        "how tensors move between ranks: "
        + ", ".join(TRANSPORT_KINDS)
        + "; a kind that is not possible is an error",
        *TRANSPORT_KINDS,
    )
    slots: int = _option(
        2, _LINKS, "messages each channel can hold at the receiver", *(1, MOST_SLOTS)
    )
    timeout: float = _option(
        600.0,
        _LINKS,
        "seconds that a rank waits for a message before it gives up",
        *(0.001, LONGEST_WAIT),  # 0 would wait for ever
    )
    checksum: bool = _option(False, _LINKS, "send a CRC32C with every message and check it")
    gpudirect: str = _option(
        "auto",
        _LINKS,
        "between hosts with RDMA: let the network card read and write GPU memory itself: auto "
        "(where it can), on (an error where it cannot), off (through the host's memory)",
        *GPUDIRECT,
    )
    node_ips: str | None = _option(
        None,
        _LINKS,
        "addresses (IPv4 or IPv6) that links between hosts are bound to, separated by commas: one "
        "per node, or one per rank",
    )
    token_file: str | None = _option(
        None,
        _LINKS,
        "file of mode 0600 with the job's secret (at least 16 bytes), on every node; by default "
        "DPP_TOKEN_FILE, else a random secret that torchrun's store passes between nodes",
    )
    record: str | None = _option(
        None,
        _STUDY,
        "file that every scheduling decision is written to (one per rank: .rankN is added)",
    )
    replay: str | None = _option(
        None, _STUDY, "file written by {record} whose decisions are run again"
    )
    inject: str | None = _option(
        None,
        _STUDY,
        "slow things down on purpose, for measurements: jitter:0.3, transient:2x:20%%, "
        "slow-rank:1:1.5, slow-link:0-1:5ms, lengths:0.5, head:1.5x",
    )

    def __post_init__(self) -> None:
        for each in option_fields():
            fault = _fault(each, getattr(self, each.name))
            self._require(not fault, each.name, fault)
        rule = f"expected one of {', '.join(POLICIES)} or your own as module:function"
        self._require(self.policy in POLICIES or ":" in str(self.policy), "policy", rule)
        try:
            Backward.of(self.split_backward)
        except ValueError as error:
            self._require(False, "split_backward", str(error))
        self.buckets(sys.maxsize)
        for address in self.node_ips.split(",") if self.node_ips else ():
            rule = f"{address!r} is not an IPv4 or IPv6 address by which other hosts reach one host"
            self._require(_is_routable(address), "node_ips", rule)
        paths = [os.path.realpath(path) for path in (self.record, self.replay) if path]
        record = setting("record", self.record)
        rule = Text(f"{record} is the same file, and would overwrite its source", record)
        self._require(len(paths) == len(set(paths)), "replay", rule)

    def _require(self, condition: object, name: str, rule: str) -> None:
        if not condition:
            given = setting(name, getattr(self, name))
            raise ConfigError(f"{given}: {rule}", given, rule)

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
        """The lengths that ``length_buckets`` pads to, ascending; empty for ``off`` and ``auto``.
        A sequence that is longer than the last one is not padded.

        Args:
            longest: tokens of the longest sequence, the last of geometric buckets.
            multiple: of which every length is a multiple.

        Raises:
            ConfigError: it is no list of ascending lengths up to ``longest``.
        """
        text, name = self.length_buckets, "length_buckets"
        if text in ("off", "auto"):
            return ()
        if text == "geometric":
            step, lengths, length = math.lcm(ENGINE_ROWS, multiple), [], float(_BUCKETS_FROM)
            while length < longest < sys.maxsize:
                lengths.append(math.ceil(round(length / step, 6)) * step)
                length *= _BUCKET_RATIO
            return (*dict.fromkeys(short for short in lengths if short < longest), longest)
        words = text.split(",")
        given = tuple(int(word) if re.fullmatch("[0-9]{1,11}", word) else 0 for word in words)
        rises = min(given) >= 1 and list(given) == sorted(set(given))
        rule = "expected auto, off, geometric, or ascending lengths like 512,1024,4096"
        self._require(rises, name, rule)
        rule = f"{given[-1]} is above the longest sequence, {longest}"
        self._require(given[-1] <= longest, name, rule)
        odd = next((length for length in given if length % multiple), None)
        rule = f"{odd} is no multiple of {multiple}, to which sequence and context parallelism pad"
        self._require(odd is None, name, f"{rule} rows")
        return given


def _fault(option: dataclasses.Field[Any], value: Any) -> str:
    """The reason why a field cannot have a value; empty if it can."""
    allowed = option.metadata["of"]
    if not allowed:
        return ""
    if isinstance(allowed[0], str):
        return "" if value in allowed else f"expected one of {', '.join(allowed)}"
    least, most = allowed
    wrong = number_fault(value, least, most, whole=isinstance(least, int))
    return f"must be from {least} to {most}" if wrong else ""


def _is_routable(text: str) -> bool:
    """True for an address at which other hosts may reach this host."""
    try:
        address: Any = ipaddress.ip_address(text)
    except ValueError:
        return False
    # A scope names an interface ("%eth0"), which IPv4 does without; mapped ones stand for IPv4.
    if address.version == 6 and (address.scope_id or address.is_link_local or address.ipv4_mapped):
        return False
    return not (address.is_unspecified or address.is_multicast)


def option_fields() -> tuple[dataclasses.Field[Any], ...]:
    """The fields of :class:`DppConfig`, section by section.

    ``metadata["section"]`` names that of a field, ``metadata["help"]`` says what it does, where
    ``{FIELD}`` stands for another field's flag.
    """
    return dataclasses.fields(DppConfig)
