"""ASD inside SGLang, as a plug-in of the group ``sglang.srt.plugins``: chains of EAGLE, NGRAM and MTP drafts.

Inert until ``ASDSIM_POLICY`` names a policy; a request may have its own ``asd_B``, ``asd_g`` and ``asd_M`` in
``custom_params``. Where SGLang compares its draft chain with the target's choices, the choices are replaced by the
draft tokens that the rule accepts; its kernel, bonus token and log-probabilities stay its own.

:meth:`Adapter.accept_policy` answers in the form that a proposed seam for DSpark asks for: ``correct_len``, ``bonus``
and ``cap_trim_lens``.

Held against the signatures of SGLang 0.5.23 with tensors made for the purpose; SGLang itself was not run.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Mapping
from typing import Any

import torch

from ...errors import EngineError
from ...files import dump_json
from ..accept import Blocks
from ..config import POLICY_ENV, TRACE_ENV, EngineConfig, engine_config, request_policy
from ..ledger import BYPASSED, Ledger, Step, is_strict

log = logging.getLogger("sglang.asdsim")

SAMPLE = "sglang.srt.speculative.eagle_utils.eagle_sample"
MATCH = "sglang.srt.speculative.eagle_utils.verify_tree_greedy_func"
FINISH = "sglang.srt.managers.schedule_batch.Req.update_finish_state"
CHECK = "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request"
SIGNATURES = {
    SAMPLE: ("verify_input", "batch", "logits_output"),
    MATCH: (
        "predicts", "accept_index", "accept_token_num", "candidates", "retrieve_index", "retrieve_next_token",
        "retrieve_next_sibling", "target_predict",
    ),
    FINISH: ("self",),
    CHECK: ("self", "obj"),
}  # fmt: skip
"""What is hooked, and the parameters that this adapter counts on."""


def register() -> None:
    """Register the hooks; called by SGLang in every process. Without ``ASDSIM_POLICY`` nothing is hooked."""
    if not os.environ.get(POLICY_ENV):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    adapter = Adapter(os.environ)
    for target, hook in adapter.hooks().items():
        HookRegistry.register(target, hook, HookType.AROUND)


class Adapter:
    """Decides for one SGLang process.

    SGLang goes on when a plug-in fails while it loads, so everything that can fail is done in the hooks, where an error
    ends the process.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = dict(environment)
        self._config: EngineConfig | None = None
        self._ledger: Ledger | None = None
        self._active: tuple[Any, torch.Tensor] | None = None
        self._step: Step | None = None
        self._checked: set[str] = set()

    def hooks(self) -> dict[str, Any]:
        """Return what to put around what."""
        return {SAMPLE: self.sample, MATCH: self.match, FINISH: self.finish, CHECK: self.check}

    @property
    def config(self) -> EngineConfig:
        """What was asked for.

        Raises
        ------
        EngineError
            If the policy cannot be read, or a trace is asked for.
        """
        if self._config is None:
            config = engine_config(None, self.environment, POLICY_ENV)
            assert config is not None
            if config.trace:
                raise EngineError("SGLang cannot record yet", where=TRACE_ENV, fix=f"unset {TRACE_ENV}")
            self._config = config
        return self._config

    def ledger(self, device: Any) -> Ledger:
        """Return the ledger of this process."""
        if self._ledger is None:
            self._ledger = Ledger(self.config.policy, device)
        return self._ledger

    def _hold(self, target: str, original: Any) -> None:
        if target in self._checked:
            return
        parameters = tuple(inspect.signature(original).parameters)
        want = SIGNATURES[target]
        if parameters[: len(want)] != want:
            raise EngineError(
                f"{target} takes {', '.join(parameters[: len(want)])}, not {', '.join(want)}",
                fix="use SGLang 0.5.23, the version that asdsim was held against",
            )
        self._checked.add(target)

    def check(self, original: Any, manager: Any, obj: Any, *rest: Any, **named: Any) -> Any:
        """Refuse a request that cannot be served, where SGLang validates requests."""
        self._hold(CHECK, original)
        params = getattr(obj, "sampling_params", None) or {}
        try:
            policy = request_policy(params.get("custom_params"), self.config.policy, "request")
            if params.get("temperature", 1.0) and not is_strict(policy):
                raise EngineError(
                    "ASD verifies greedy decoding only", where="request", fix="set temperature to 0, or asd_B to 0"
                )
        except EngineError as error:
            raise ValueError(f"asdsim: {error}") from None
        return original(manager, obj, *rest, **named)

    def slots(self, batch: Any) -> torch.Tensor:
        """Return the slots of a batch; requests met for the first time are admitted."""
        ledger = self.ledger(batch.device)
        for request in batch.reqs:
            if request.rid not in ledger:
                params = request.sampling_params
                policy = request_policy(params.custom_params, self.config.policy, f"request {request.rid}")
                # Its first token comes from prefill, whether or not SGLang has entered it yet.
                ledger.admit(
                    request.rid, policy, limit=params.max_new_tokens, stop_ids=stop_ids_of(request), generated=1
                )
        return ledger.slots([request.rid for request in batch.reqs])

    def sample(self, original: Any, verify_input: Any, batch: Any, logits_output: Any, *rest: Any, **named: Any) -> Any:
        """Put around ``eagle_sample``."""
        self._hold(SAMPLE, original)
        if batch.forward_mode.is_idle():
            return original(verify_input, batch, logits_output, *rest, **named)
        if verify_input.tree_topk != 1:
            raise EngineError(
                f"drafts are a tree (topk {verify_input.tree_topk})",
                fix="draft a chain: --speculative-eagle-topk 1, --speculative-ngram-max-bfs-breadth 1",
            )
        slots = self.slots(batch)
        self._active, self._step = (slots, logits_output.next_token_logits), None
        predict, correct, index = original(verify_input, batch, logits_output, *rest, **named)
        self._active = None
        ledger = self.ledger(batch.device)
        if self._step is None:  # a batch with sampled requests goes another way
            ledger.flag(slots, BYPASSED)
        else:
            tokens = torch.where(index >= 0, predict.flatten()[index.clamp(min=0).long()], -1)
            ledger.commit(self._step, tokens)
        return predict, correct, index

    def match(self, original: Any, **named: Any) -> Any:
        """Put around ``verify_tree_greedy_func``, which is called with names."""
        self._hold(MATCH, original)
        if self._active is None:
            return original(**named)
        slots, logits = self._active
        candidates = named["candidates"]
        follows = named["retrieve_next_token"] == torch.arange(1, candidates.shape[1] + 1, device=candidates.device)
        widths = follows[:, :-1].long().cumprod(1).sum(1)
        self._step = decide_chains(self.ledger(logits.device), slots, candidates, logits, widths)
        named["target_predict"] = told(named["target_predict"], candidates, self._step)
        return original(**named)

    def finish(self, original: Any, request: Any, *rest: Any, **named: Any) -> Any:
        """Put around ``Req.update_finish_state``."""
        self._hold(FINISH, original)
        result = original(request, *rest, **named)
        if self._ledger is not None and request.finished():
            report = self._ledger.release(request.rid)
            if report is not None:
                say = log.error if report.faults else log.info
                say("asd: %s", dump_json(report.to_dict()))
        return result

    def accept_policy(
        self,
        slots: torch.Tensor,
        candidates: torch.Tensor,
        target_logits: torch.Tensor,
        verify_lens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Accept draft chains, in the form of SGLang's ``accept_draft_tokens``.

        Parameters
        ----------
        slots : int64 (N,)
        candidates : int (N, K + 1)
            The current token, then the draft.
        target_logits : float (N (K + 1), V)
        verify_lens : int (N,), optional
            Rows of each request that were verified; draft tokens from ``verify_lens - 1`` on are not committed.

        Returns
        -------
        correct_len : int32 (N,)
            Draft tokens accepted.
        bonus : int64 (N,)
            The target's token behind them.
        cap_trim_lens : int32 (N,)
            What ``verify_lens`` cut off.
        """
        number, rows = candidates.shape
        most = None if verify_lens is None else verify_lens.to(candidates.device).long() - 1
        widths = torch.full((number,), rows - 1, device=candidates.device)
        step = decide_chains(self.ledger(candidates.device), slots, candidates, target_logits, widths, most)
        choice = told(target_logits.argmax(-1).view(number, rows), candidates, step)
        correct = (candidates[:, 1:] == choice[:, :-1]).long().cumprod(1).sum(1)
        trimmed = torch.zeros_like(correct)
        if most is not None:
            trimmed = (correct - most).clamp(min=0)
            correct = torch.minimum(correct, most)
        bonus = choice.gather(1, correct[:, None])[:, 0].long()
        tokens = torch.nn.functional.pad(candidates[:, 1:].long(), (0, 1), value=-1)
        places = torch.arange(rows, device=tokens.device)
        tokens = torch.where(
            places < correct[:, None], tokens, torch.where(places == correct[:, None], bonus[:, None], -1)
        )
        self.ledger(candidates.device).commit(step, tokens)
        return correct.int(), bonus, trimmed.int()


def stop_ids_of(request: Any) -> list[int]:
    """Return the token ids that end a request, as SGLang looks for them."""
    params = request.sampling_params
    if params.ignore_eos:
        return []
    tokenizer = getattr(request, "tokenizer", None)
    eos = getattr(tokenizer, "eos_token_id", None)
    more = getattr(tokenizer, "additional_stop_token_ids", None)
    return [*(params.stop_token_ids or ()), *(request.eos_token_ids or ()), *(more or ()),
            *(() if eos is None else (eos,))]  # fmt: skip


def decide_chains(
    ledger: Ledger,
    slots: torch.Tensor,
    candidates: torch.Tensor,
    logits: torch.Tensor,
    widths: torch.Tensor,
    most: torch.Tensor | None = None,
) -> Step:
    """Decide chains whose rows lie in blocks of equal size, the current token first."""
    number, rows = candidates.shape
    position = torch.arange(rows - 1, device=candidates.device)
    start = torch.arange(number, device=candidates.device)[:, None] * rows
    blocks = Blocks(widths, position < widths[:, None], start + position)
    drafts = candidates.roll(-1, 1).flatten().clamp(min=0)  # the draft token of a row is the next one of its chain
    return ledger.verify(slots, blocks, drafts, logits, lifts=False, most=most)


def told(choice: torch.Tensor, candidates: torch.Tensor, step: Step) -> torch.Tensor:
    """Return the target's choices (N, K + 1) with the accepted draft tokens in their place."""
    position = torch.arange(choice.shape[1], device=choice.device)
    accepted = position < step.decision.accepted[:, None]
    return torch.where(accepted, candidates.roll(-1, 1).to(choice.dtype), choice)
