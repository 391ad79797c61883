"""Texts of many beginnings of one chat, from one rendering of its template.

A template is a program that reads a list. Up to the place where it asks for a message that a
beginning lacks, or for the end of the list, it does for the whole chat just as for the beginning.
Most templates end with a loop over the messages. That loop runs once here: behind each message that
ends a beginning, the message is rendered again as the last of the list, and then what stands behind
the loop. After that the template's variables are put back, and the loop goes on.

What a template asks of the list is noted. A beginning gets no text here where the template knew
more by then than it could know from the beginning alone, or keeps what cannot be put back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import Undefined, nodes, pass_context
from jinja2.runtime import Macro
from jinja2.utils import Namespace

_OURS = "dpp__"
"""Start of the variables that are added to a template; one that has such a name is left alone."""
_TURNS, _LOOP, _ENDS = _OURS + "turns", _OURS + "loop", _OURS + "ends"
_FIXED = str, int, float, type(None), Undefined, Macro


class NotFollowed(BaseException):
    """A template does what cannot be followed. No ``except Exception`` of Jinja takes it."""


def followed(environment: Any, text: str) -> nodes.Template | None:
    """A template whose last loop is over the turns of a :class:`Run`; None where it has none, or
    where what stands behind the loop is more than an output."""
    tree: nodes.Template = environment.parse(text)
    places = [place for place, node in enumerate(tree.body) if isinstance(node, nodes.For)]
    names = {node.name for node in tree.find_all(nodes.Name)}
    if not places or any(name.startswith(_OURS) for name in names):
        return None
    main: Any = tree.body[places[-1]]
    behind = tree.body[places[-1] + 1 :]
    stored = {n.name for n in main.find_all(nodes.Name) if n.ctx != "load"} | {"loop"}
    odd = main.find((nodes.Macro, nodes.Import, nodes.FromImport)) or not _is_plain(main)
    if odd or not all(_is_output(node, stored) for node in behind):
        return None
    try:
        for node in main.body:
            _rename_loop(node)
    except NotFollowed:
        return None
    main.target = nodes.Tuple([main.target, _name(_LOOP, "store"), _name(_ENDS, "store")], "store")
    main.iter = nodes.Call(_name(_TURNS), [main.iter], [], None, None)
    main.body = [nodes.If(_name(_ENDS), behind, [], main.body)]
    tree.set_lineno(1).set_environment(environment)
    return tree


def _name(name: str, context: str = "load") -> nodes.Name:
    return nodes.Name(name, context)


def _is_plain(loop: nodes.For) -> bool:
    return not (loop.test or loop.else_ or loop.recursive)


def _is_output(node: nodes.Node, hidden: set[str]) -> bool:
    """True for what only writes, and reads no variable of the loop."""
    if isinstance(node, nodes.Name) and (node.ctx != "load" or node.name in hidden):
        return False
    known = isinstance(node, nodes.Expr | nodes.Helper | nodes.Output | nodes.If)
    return known and all(_is_output(each, hidden) for each in node.iter_child_nodes())


def _rename_loop(node: nodes.Node) -> None:
    """Let the variable ``loop`` of a loop's body be ours."""
    if isinstance(node, nodes.Name) and node.name == "loop":
        if node.ctx != "load":
            raise NotFollowed
        node.name = _LOOP
    inside: Iterator[nodes.Node] = node.iter_child_nodes()
    if isinstance(node, nodes.For):  # which has its own
        if not _is_plain(node) and _reads_loop([node.test, *node.else_]):
            raise NotFollowed
        inside = iter([node.iter])
    elif isinstance(node, nodes.Macro | nodes.CallBlock | nodes.Block) and _reads_loop([node]):
        raise NotFollowed
    for each in inside:
        _rename_loop(each)


def _reads_loop(given: Sequence[nodes.Node | None]) -> bool:
    names = (name for node in given if node for name in [node, *node.find_all(nodes.Name)])
    return any(isinstance(name, nodes.Name) and name.name == "loop" for name in names)


class _Strict:
    """A stand-in in a template: what it lacks is not followed."""

    def __getattr__(self, name: str) -> NoReturn:
        raise NotFollowed

    def _refuse(self, *_: object) -> NoReturn:
        raise NotFollowed

    __str__ = __repr__ = __eq__ = __hash__ = _refuse


class _Messages(_Strict):
    """The list of messages from a number on, as a template reads it."""

    def __init__(self, run: Run, start: int) -> None:
        self._run, self._start = run, start

    def _list(self) -> list[Any]:
        self._run.known = math.inf
        return self._run.messages[self._start : self._run.end]

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, int) and 0 <= key < self._run.end - self._start:
            return self._run.message(self._start + key)
        if isinstance(key, slice) and key.stop is None and key.step in (None, 1):
            first = 0 if key.start is None else key.start
            if isinstance(first, int) and first >= 0:
                return _Messages(self._run, self._start + first)
        return self._list()[key]

    def __iter__(self) -> Iterator[Any]:
        number = self._start
        while number < self._run.end:
            yield self._run.message(number)
            number += 1
        self._run.known = math.inf

    def __len__(self) -> int:
        return len(self._list())

    def __bool__(self) -> bool:
        if self._start >= self._run.end:
            return bool(self._list())
        self._run.message(self._start)
        return True

    def __contains__(self, message: Any) -> bool:
        return message in self._list()


class _Loop(_Strict):
    """The variable ``loop`` of a turn."""

    depth, depth0 = 1, 0

    def __init__(self, run: Run, start: int, number: int) -> None:
        self._run, self._number = run, number
        self.index0 = number - start
        self.index, self.first = self.index0 + 1, not self.index0

    def cycle(self, *values: Any) -> Any:
        return values[self.index0 % len(values)]

    @property
    def previtem(self) -> Any:
        return self._run.undefined() if self.first else self._run.message(self._number - 1)

    @property
    def last(self) -> bool:
        more = self._number + 1 < self._run.end
        self._run.known = max(self._run.known, self._number + 2 if more else math.inf)
        return not more

    @property
    def nextitem(self) -> Any:
        return self._run.undefined() if self.last else self._run.message(self._number + 1)

    @property
    def revindex0(self) -> int:
        self._run.known = math.inf
        return self._run.end - self._number - 1

    @property
    def revindex(self) -> int:
        return self.revindex0 + 1

    @property
    def length(self) -> int:
        return self.index + self.revindex0


class Run:
    """One rendering of a chat by a template that :func:`followed` has changed.

    Args:
        messages: of the chat.
        counts: of messages of the beginnings.
        environment: of the template.

    Attributes:
        pieces: of the text, to which the caller adds each before it asks for the next.
        found: of beginnings, by their count of messages: how many characters of :attr:`shared` they
            begin with, what follows, and whether today's date is in it.
        known: number of messages of the shortest beginning for which the template would have done
            the same so far.
    """

    def __init__(
        self,
        messages: Sequence[Mapping[str, Any]],
        counts: set[int],
        environment: Any,
    ) -> None:
        self.messages, self.end = list(messages), len(messages)
        self.known: float = 0
        self.found: dict[int, tuple[int, str, bool]] = {}
        self.undefined: Callable[[], Undefined] = environment.undefined
        self._wanted = counts
        self.pieces, self._environment = list[str](), environment
        self._seen = self._length = 0
        self._kept: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def variables(self) -> dict[str, Any]:
        """The variables that the template reads in the place of the messages."""
        return {"messages": _Messages(self, 0), _TURNS: self._turns}

    @property
    def shared(self) -> str:
        """The text of the whole chat, up to the last message that ends a beginning."""
        return "".join(self.pieces)[: self._length]

    def message(self, number: int) -> Any:
        """A message that the template reads."""
        self.known = max(self.known, number + 1)
        return self.messages[number]

    @pass_context
    def _turns(self, context: Any, given: object) -> Iterator[tuple[Any, _Loop | None, bool]]:
        if not isinstance(given, _Messages) or given._run is not self:
            raise NotFollowed
        self._kept = [(_attributes(each), {}) for each in _namespaces(context.vars)]
        start = given._start
        for number in range(start, max(self._wanted, default=0)):
            if number + 1 in self._wanted and self.known <= number + 1:
                yield from self._ending(start, number)
            yield self.message(number), _Loop(self, start, number), False

    def _ending(self, start: int, number: int) -> Iterator[tuple[Any, _Loop | None, bool]]:
        """The turn of a message as the last one, and what stands behind the loop."""
        known, end, dated = self.known, self.end, self._environment.wrote_date
        self._keep()
        place, self.end = len(self.pieces), number + 1
        self._length += sum(map(len, self.pieces[self._seen : place]))
        self._seen = place
        yield self.messages[number], _Loop(self, start, number), False
        yield None, None, True
        rest, dates = "".join(self.pieces[place:]), self._environment.wrote_date
        self.found[number + 1] = self._length, rest, dates
        del self.pieces[place:]
        for attributes, values in self._kept:
            attributes.clear()
            attributes.update(values)
        self.known, self.end, self._environment.wrote_date = known, end, dated

    def _keep(self) -> None:
        """Note the values of the template's namespaces."""
        for attributes, values in self._kept:
            for name, value in attributes.items():
                if (name not in values or values[name] is not value) and not _is_fixed(value):
                    raise NotFollowed
            values.clear()
            values.update(attributes)


def _attributes(namespace: Namespace) -> dict[str, Any]:
    found: dict[str, Any] = getattr(namespace, "_Namespace__attrs")  # noqa: B009 - as Jinja has it
    return found


def _namespaces(variables: Mapping[str, Any]) -> Iterator[Namespace]:
    """The namespaces among a template's variables, the others of which nothing can change."""
    for value in variables.values():
        if isinstance(value, Namespace):
            yield value
        elif not _is_fixed(value):
            raise NotFollowed


def _is_fixed(value: Any) -> bool:
    """True for a value that a template cannot change, nor use up."""
    if type(value) in (list, tuple):
        return all(map(_is_fixed, value))
    if type(value) is dict:
        return all(map(_is_fixed, value.values()))
    return isinstance(value, _FIXED) or type(value) is _Messages
