"""Saves and resumes: megatron-core's dist_checkpointing (``torch_dist``) and plain ``torch`` files.

``contents`` says what a checkpoint holds, ``loader`` reads it, ``saver`` writes it, and ``files``
places the files and makes them visible. A ``torch_dist`` checkpoint may be resumed with other
tensor, pipeline, virtual and data parallel sizes.
"""

from __future__ import annotations

from typing import Any

from megatron.dpp_train.checkpoint import random_state
from megatron.dpp_train.checkpoint.contents import Contents
from megatron.dpp_train.checkpoint.loader import Loader
from megatron.dpp_train.checkpoint.saver import Saver
from megatron.dpp_train.model.build import Trainee
from megatron.dpp_train.state import Run


class Checkpointer:
    """Saves and loads the state of one run. As a context it waits for background writes at its end,
    but not after an error."""

    loader_kind, saver_kind = Loader, Saver

    def __init__(self, run: Run, trainee: Trainee) -> None:
        contents = Contents(run, trainee)
        self._args = run.args
        self._loader, self._saver = self.loader_kind(contents), self.saver_kind(contents)
        self._random_states: Any = None

    @property
    def last_saved(self) -> int:
        """Iteration of the last checkpoint that this run saved or started to save; -1 for none."""
        return self._saver.last_saved

    def load(self) -> None:
        """As :meth:`Loader.load`, which names the errors; keeps the random states for
        :meth:`restore_random_state`."""
        self._random_states = self._loader.load()

    def restore_random_state(self) -> None:
        """Sets the generators to the checkpoint's states, if it has any.

        Call it when everything is built: ``data`` draws for its loaders from the CPU's generator,
        which without a GPU is dropout's.
        """
        if self._random_states is not None:
            random_state.restore(self._args, self._random_states)
            self._random_states = None

    def save(self) -> None:
        """Writes a checkpoint of the present iteration; a collective.

        Raises:
            DataError: writing failed; the previous checkpoint is unchanged.
        """
        self._saver.save()

    def poll(self) -> None:
        """Commits background writes that are done; called between iterations. A collective.

        Raises:
            DataError: one of them failed; the previous checkpoint is unchanged.
        """
        self._saver.finish(blocking=False)

    def wait(self) -> None:
        """Waits for background writes and commits them. A collective; errors as :meth:`poll`."""
        self._saver.finish(blocking=True)

    def close(self) -> None:
        """:meth:`wait`, and no more saves in the background; calling it twice is fine."""
        self.wait()
        self._saver.end(abort=False)

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:  # no commit, which is a collective: the other ranks may be in the middle of another
            self._saver.end(abort=True)
