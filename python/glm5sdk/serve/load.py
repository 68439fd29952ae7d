"""From a checkpoint's folder to an engine: the model whole, with experts on disk, or spread over processes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path

from glm5sdk.core.errors import ContractError
from glm5sdk.models.glm5.fingerprint import fingerprint
from glm5sdk.models.glm5.model import Glm5ForCausalLM
from glm5sdk.parallel import join_processes, make_mesh
from glm5sdk.serve.admission import AdmissionPolicy
from glm5sdk.serve.config import EngineConfig
from glm5sdk.serve.engine import Engine
from glm5sdk.serve.lockstep import Lockstep
from glm5sdk.text.tokenizer import Tokenizer

__all__ = ["ExpertSpread", "load_engine"]


@dataclass(frozen=True)
class ExpertSpread:
    """This process's place among those that share the experts.

    Attributes:
        rank: from 0.
        size: processes.
        meeting: where they find each other: "tcp://host:port" or "file://...".
        timeout_s: seconds after which a process that is not heard of counts as dead.
    """

    rank: int
    size: int
    meeting: str
    timeout_s: float = 120.0


def load_engine(
    path: str | PathLike[str],
    config: EngineConfig | None = None,
    *,
    dtype: str = "auto",
    device: str = "cpu",
    tokenizer: Tokenizer | None = None,
    expert_slots: int | None = None,
    spread: ExpertSpread | None = None,
    admission: AdmissionPolicy | None = None,
) -> Engine:
    """An engine over a checkpoint.

    Args:
        path: the folder.
        config: sizes and switches.
        dtype: of the activations; see `Glm5ForCausalLM.from_pretrained`.
        device: where the model lives.
        tokenizer: None takes the checkpoint's, if it has one.
        expert_slots: experts a layer keeps in memory; the others stay on disk. None keeps all.
        spread: share the experts with other processes, and step with them.
        admission: the queue.

    Raises:
        CheckpointError: the checkpoint is damaged. ContractError: a setting does not fit.
        CapacityError: the cache does not fit into memory.
    """
    folder, config = Path(path), config or EngineConfig()
    if tokenizer is None and (folder / "tokenizer.json").exists():
        tokenizer = Tokenizer.from_pretrained(folder)
    if config.weight_version is None:
        config = replace(config, weight_version=fingerprint(folder))
    if spread is None:
        model = Glm5ForCausalLM.from_pretrained(folder, dtype=dtype, device=device, expert_slots=expert_slots)
        return Engine(model, tokenizer, config, admission=admission)
    if expert_slots is not None:
        raise ContractError("engine: expert_slots and spread are both given, needs one of them at most")
    kind = device.partition(":")[0]
    join_processes(spread.rank, spread.size, spread.meeting, kind, spread.timeout_s)
    group = make_mesh({"expert": spread.size}, kind)["expert"]
    model = Glm5ForCausalLM.from_pretrained(folder, dtype=dtype, device=device, expert_group=group)
    return Engine(model, tokenizer, config, admission=admission, lockstep=Lockstep(group))
