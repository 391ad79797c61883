"""Settings of a transport, checked once, and the variables of the environment that tune RDMA."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from megatron.dpp.config import GPUDIRECT, LONGEST_WAIT
from megatron.dpp.errors import ConfigError, number_fault

_TUNED = ("workload", "tcp_connections", "peer_timeout")
"""Fields of :class:`TransportOptions` that have a variable of the environment."""


def _option(default: Any, *allowed: Any) -> Any:
    """A field with its least and greatest value, or its words; without either, any text."""
    return field(default=default, metadata={"allowed": allowed})


def _check(options: Any, named: Callable[[str], str]) -> None:
    """Raise a ConfigError for a value that its field does not allow."""
    for each in fields(options):
        value, allowed, fault = getattr(options, each.name), each.metadata.get("allowed"), ""
        if allowed and isinstance(allowed[0], str):
            if value not in allowed:
                fault = f"is {value}; expected one of {', '.join(allowed)}"
        elif allowed:
            fault = number_fault(value, *allowed, whole=isinstance(allowed[0], int))
        if fault:
            raise ConfigError(f"{named(each.name)} {fault}")


@dataclass(frozen=True, kw_only=True)
class RdmaOptions:
    """Settings of RDMA ports and queue pairs. Each is a variable ``DPP_RDMA_NAME`` of the
    environment, which a node may set for its own cards; ``docs/flags.md`` says what they do.

    Raises:
        ConfigError: a value is out of its range.
    """

    devices: str = ""
    traffic_class: int = _option(106, 0, 255)
    service_level: int = _option(0, 0, 15)
    pkey_index: int = _option(0, 0, 65535)
    gid_index: int = _option(-1, -1, 255)
    timeout: int = _option(20, 1, 31)
    retries: int = _option(7, 0, 7)
    adaptive_routing: str = _option("auto", *GPUDIRECT)

    def __post_init__(self) -> None:
        _check(self, variable)

    @classmethod
    def of(cls, environment: Mapping[str, str] = os.environ) -> RdmaOptions:
        """The values of the variables; an empty one counts as missing."""
        return cls(**_given(cls, variable, environment))


def variable(name: str) -> str:
    """The variable of a field of :class:`RdmaOptions`."""
    return f"DPP_RDMA_{name.upper()}"


def _given(
    options: Any, named: Callable[[str], str], environment: Mapping[str, str]
) -> dict[str, Any]:
    """The fields that variables of the environment give. A text that is no number where the field
    is one stays a text, which the field's range then refuses.
    """
    given: dict[str, Any] = {}
    for each in fields(options):
        if text := environment.get(named(each.name)):
            number: Any = type(each.default)
            try:
                given[each.name] = number(text)
            except ValueError:
                given[each.name] = text
    return given


@dataclass(frozen=True, kw_only=True)
class TransportOptions:
    """Settings of one transport; equal on all ranks of a job, but for ``rdma`` and ``node_ips``.

    Args:
        timeout: seconds that a wait inside the transport (a lagging board reader, a full queue of
            puts) may last.
        setup_timeout: seconds in which all peers must have opened their side.
        checksum: send a CRC32C with every payload and check it in ``take``.
        workload: elements per chunk where a kind stages tensors through host memory.
        gpudirect: RDMA cards read and write GPU memory themselves: ``auto`` (where possible),
            ``on`` (else an error), ``off``.
        rdma: settings of RDMA ports and queue pairs.
        node_ips: this host's address that links to other hosts are bound to; None lets no other
            host in.
        address_of: what ``node_ips`` is: ``rank`` (the address of this rank alone, whose RDMA port
            it names), ``node`` (that of the node, given by the user), ``route`` (found).
        listen_ports: first and last port that a rank may listen on for other hosts; None takes any.
        tcp_connections: connections of a tcp link that carry payloads, 1 to 16.
        token_file: file (mode 0600) with the job's secret; None takes ``DPP_TOKEN_FILE`` from the
            environment, or agrees on a random secret through the store.
        peer_timeout: seconds that a host may be out of reach over TCP before it counts as gone.
        max_pending: puts that may be waiting for credit on one channel before ``put`` itself waits.
        abandon_after: seconds after a failure at which a process that has not noticed it is ended
            (``native.Abandon``); None never ends it.
        spin: spin before sleeping in ``wait``; None decides from the cores that are free.
    """

    timeout: float = _option(600.0, 0.001, LONGEST_WAIT)
    setup_timeout: float = _option(60.0, 0.001, LONGEST_WAIT)
    checksum: bool = False
    workload: int = _option(1 << 20, 1, 1 << 40)
    gpudirect: str = _option("auto", *GPUDIRECT)
    rdma: RdmaOptions = field(default_factory=RdmaOptions.of)
    node_ips: str | None = None
    address_of: str = "rank"
    listen_ports: tuple[int, int] | None = None
    tcp_connections: int = _option(4, 1, 16)
    token_file: str | None = None
    peer_timeout: float = _option(30.0, 0.001, LONGEST_WAIT)
    max_pending: int = _option(1024, 1, 1 << 20)
    abandon_after: float | None = None
    spin: bool | None = None

    def __post_init__(self) -> None:
        _check(self, lambda name: _tuning(name) or f"transport option {name}")
        if self.max_pending & (self.max_pending - 1):
            raise ConfigError(
                f"transport option max_pending is {self.max_pending}; give a power of two"
            )


def _tuning(name: str) -> str:
    """The variable of a field that one may set, else ""."""
    return f"DPP_{name.upper()}" if name in _TUNED else ""


def tuned(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Fields of :class:`TransportOptions` that variables of the environment give: ``DPP_WORKLOAD``,
    ``DPP_TCP_CONNECTIONS``, ``DPP_PEER_TIMEOUT``, and ``DPP_LISTEN_PORTS`` with one port or two,
    like ``29700-29763``.

    Raises:
        ConfigError: a value is no number, or no range of ports.
    """
    options = _given(TransportOptions, _tuning, environment)
    if ports := environment.get("DPP_LISTEN_PORTS"):
        first, dash, last = ports.partition("-")
        numbers = [int(port) if port.isdecimal() else 0 for port in (first, last or first)]
        if not 1 <= numbers[0] <= numbers[1] <= 65535 or (dash and not last):
            raise ConfigError(
                f"DPP_LISTEN_PORTS={ports}: expected two ports from 1 to 65535, the lower one "
                "first, like 29700-29763"
            )
        options["listen_ports"] = tuple(numbers)
    return options
