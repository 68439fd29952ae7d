"""LLM: the engine for programs that have all their prompts at hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from os import PathLike
from pathlib import Path
from typing import Any

from glm5sdk.core.errors import ContractError
from glm5sdk.models.glm5.model import Glm5ForCausalLM
from glm5sdk.serve.admission import AdmissionPolicy
from glm5sdk.serve.config import EngineConfig
from glm5sdk.serve.engine import Engine
from glm5sdk.serve.load import load_engine
from glm5sdk.serve.outputs import RequestOutput
from glm5sdk.serve.params import SamplingParams
from glm5sdk.text.chat import ChatTemplate
from glm5sdk.text.tokenizer import Tokenizer

__all__ = ["LLM"]

Prompt = str | Sequence[int]


class LLM:
    """Offline generation with continuous batching.

    Args:
        model: folder of a checkpoint, or a model that is loaded already.
        dtype: of the activations; see `Glm5ForCausalLM.from_pretrained`.
        device: where a checkpoint is loaded to.
        tokenizer: None takes the checkpoint's; a loaded model has none unless it is given.
        expert_slots: experts a layer keeps in memory, the others stay on disk; None keeps all.
        admission: the queue; see glm5sdk.serve.admission.
        **config: fields of `EngineConfig`, for example kv_cache_dtype, max_num_seqs, enable_prefix_caching or
            speculative_tokens.

    Raises:
        CheckpointError: the checkpoint is damaged. ContractError: a setting does not fit.
        CapacityError: the cache does not fit into memory.
    """

    def __init__(
        self,
        model: str | PathLike[str] | Glm5ForCausalLM,
        *,
        dtype: str = "auto",
        device: str = "cpu",
        tokenizer: Tokenizer | None = None,
        expert_slots: int | None = None,
        admission: AdmissionPolicy | None = None,
        **config: Any,
    ) -> None:
        try:
            settings = EngineConfig(**config)
        except TypeError as error:
            known = ", ".join(EngineConfig.__dataclass_fields__)
            raise ContractError(f"LLM: {error}, needs settings among: {known}") from None
        self._template: ChatTemplate | None = None
        self._folder = None if isinstance(model, Glm5ForCausalLM) else Path(model)
        if isinstance(model, Glm5ForCausalLM):
            if expert_slots is not None:
                raise ContractError("LLM: expert_slots is given with a loaded model, needs a folder to load from")
            self.engine = Engine(model, tokenizer, settings, admission=admission)
        else:
            self.engine = load_engine(
                model, settings, dtype=dtype, device=device, tokenizer=tokenizer, expert_slots=expert_slots,
                admission=admission,
            )  # fmt: skip
        self.tokenizer = self.engine.tokenizer
        self._names = count()

    @property
    def model(self) -> Glm5ForCausalLM:
        """The model; the engine runs it."""
        return self.engine.model

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        cache_salt: str = "",
        adapter: str | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts.

        Args:
            prompts: texts or token ids; one prompt or several.
            params: for all, or one for each.
            cache_salt: prefixes are shared under equal salts only.
            adapter: name of a loaded adapter.

        Returns:
            One output a prompt, in order.

        Raises:
            ContractError, CapacityError: a prompt can never run; nothing was run.
            RuntimeError: a request failed while it ran; says how many did and why the first.
        """
        texts = _several(prompts)
        settings = [params or SamplingParams()] * len(texts) if not isinstance(params, Sequence) else list(params)
        if len(settings) != len(texts):
            raise ContractError(f"LLM: params holds {len(settings)} entries, needs one a prompt: {len(texts)}")
        tokens = [self._tokens(p) for p in texts]
        names = [f"llm-{next(self._names)}" for _ in texts]
        added: list[str] = []
        try:
            for name, ids, setting in zip(names, tokens, settings, strict=True):
                self.engine.add(name, ids, setting, cache_salt=cache_salt, adapter=adapter)
                added.append(name)
            return self._run(
                RequestOutput.begun(name, text if isinstance(text, str) else None, ids, setting.n)
                for name, text, ids, setting in zip(names, texts, tokens, settings, strict=True)
            )
        except BaseException:
            for name in added:
                self.engine.abort(name)
            raise

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> RequestOutput:
        """Answer a conversation by the checkpoint's chat template; `variables` are the template's."""
        if self._template is None:
            if self._folder is None:
                raise ContractError("LLM: model was given loaded, needs a checkpoint's folder, for its chat template")
            self._template = ChatTemplate.from_pretrained(self._folder)
        text = self._template.render(messages, tools=tools, add_generation_prompt=True, **variables)
        return self.generate(text, params)[0]

    def control(self, command: str, **arguments: Any) -> Any:
        """Run one of the engine's commands, `update_weights` or `load_adapter` for example; see docs/serving.md."""
        return self.engine.control.run(command, arguments)

    def shutdown(self) -> None:
        """End the engine; what runs is aborted."""
        self.engine.close()

    def _tokens(self, prompt: Prompt) -> list[int]:
        if not isinstance(prompt, str):
            return list(prompt)
        if self.tokenizer is None:
            raise ContractError("LLM: prompt is a text and there is no tokenizer, needs token ids")
        return self.tokenizer.encode(prompt)

    def _run(self, requests: Iterable[RequestOutput]) -> list[RequestOutput]:
        found = {request.request_id: request for request in requests}
        alive, errors = set(found), []
        while alive:
            deltas = self.engine.step()
            for delta in deltas:
                if delta.request_id in found:
                    found[delta.request_id].add(delta)
                    errors += [f"request {delta.request_id} failed: {delta.error}"] * (delta.error is not None)
            alive -= {d.request_id for d in deltas if d.finish_reason and not self.engine.knows(d.request_id)}
            if not deltas:
                self.engine.wait()
        if errors:
            raise RuntimeError(f"LLM: {errors[0]}" + (f" (and {len(errors) - 1} more)" if errors[1:] else ""))
        return list(found.values())


def _several(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, (bytes, Mapping)) or not isinstance(prompts, Sequence):
        raise ContractError(f"LLM: prompts is {type(prompts).__name__}, needs texts or lists of token ids")
    if prompts and all(isinstance(p, int) for p in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]
