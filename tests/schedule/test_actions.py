"""Actions and geometry: printing, parsing, packing, checking."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.dpp.errors import ConfigError, ScheduleError
from megatron.dpp.schedule import Action, Geometry, Kind

actions = st.builds(
    Action,
    st.sampled_from(Kind),
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**24 - 1),
    st.integers(0, 2**16 - 1),
)


@given(actions)
def test_text_and_word_round_trip(action):
    assert Action.parse(str(action)) == action
    word = action.word()
    assert 0 < word < 2**63
    assert Action.from_word(word) == action


@pytest.mark.parametrize("text", ["", "F3", "1X3", "1F", "1F3.", "-1F3", "1F3 "])
def test_wrong_text_is_refused(text):
    with pytest.raises(ScheduleError, match="not an action"):
        Action.parse(text)


@pytest.mark.parametrize("word", [0, -1, 1 << 62])
def test_wrong_word_is_refused(word):
    with pytest.raises(ScheduleError, match="packed"):
        Action.from_word(word)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_ranks": 0}, "num_ranks 0"),
        ({"rank": 4}, "rank 4"),
        ({"num_chunks": 0}, "num_chunks 0"),
        ({"num_microbatches": 0}, "num_microbatches 0"),
        ({"group": 3}, "microbatch_group_size_per_vp_stage=3: must be at least"),
        ({"w_pieces": (1,)}, "expected 2"),
        ({"w_pieces": (1, -1)}, "below 0"),
    ],
)
def test_geometry_names_what_is_wrong(values, message):
    good = {"num_ranks": 4, "rank": 0, "num_chunks": 2, "num_microbatches": 8}
    with pytest.raises(ConfigError, match=message):
        Geometry(**(good | values))


def test_one_chunk_has_groups_of_any_size():
    """As for megatron-core, which reads the size for interleaved schedules alone."""
    assert Geometry(4, 0, 1, 8, group=2).group == 2
