"""Commands of the engine come from anybody's JSON: wrong ones are refused by name, and nothing happens."""

from __future__ import annotations

import contextlib

import pytest
from engine_cases import check_drained, make_engine
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5sdk.core.errors import CheckpointError, ContractError
from glm5sdk.serve.engine import Engine

COMMANDS = {
    "update_weights": ("path", "version"), "swap_experts": ("path",), "load_adapter": ("name", "path"),
    "unload_adapter": ("name",), "export_prefix": ("token_ids", "cache_salt", "seconds"),
    "read_lease": ("lease_id", "first", "count"), "renew_lease": ("lease_id", "seconds"),
    "release_lease": ("lease_id",),
    "import_prefix": ("tokens", "rows", "weight_version", "geometry", "pages", "cache_salt"), "pause": (), "resume": (),
    "flush_cache": (), "list_weights": (), "shutdown": (),
}  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine()


@given(st.data())
@settings(deadline=None, max_examples=150)
def test_whatever_is_asked_for_is_done_or_refused(engine: Engine, data: st.DataObject) -> None:
    command = data.draw(st.sampled_from(sorted(COMMANDS)))
    arguments = {name: data.draw(JSON, name) for name in COMMANDS[command] if data.draw(st.booleans(), f"with {name}")}
    with contextlib.suppress(ContractError, CheckpointError):
        engine.control.run(command, arguments)
    engine.resume()
    check_drained(engine)
    assert engine.weight_version == "default"
    assert engine.weights.adapters == []
    assert len(engine.leases) == 0


@pytest.mark.parametrize("command, arguments, said", [
    ("dance", {}, "needs one of: pause"),
    ("pause", {"x": 1}, "arguments of pause"),
    ("renew_lease", {"lease_id": 5}, "lease_id of renew_lease is 5, needs a text"),
    ("read_lease", {"lease_id": "a", "first": -1}, "first of read_lease is -1, needs an int, at least 0"),
    ("export_prefix", {"token_ids": [1, True]}, "holds what is no int"),
    ("export_prefix", {"token_ids": [1], "seconds": "1"}, "seconds of export_prefix is '1', needs a number"),
])  # fmt: skip
def test_a_refusal_says_what_is_wrong(engine: Engine, command: str, arguments: dict, said: str) -> None:
    with pytest.raises(ContractError, match=said):
        engine.control.run(command, arguments)
