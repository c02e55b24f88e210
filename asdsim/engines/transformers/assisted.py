"""ASD in Transformers' assisted generation, with any assistant model, prompt look-up or early exit.

    asd = Assisted("policy.json")                       # or Assisted(Policy(8, 0.25, 2))
    model.generate(ids, custom_generate=asd, prompt_lookup_num_tokens=7)
    asd.report.to_dict()

    asd = Assisted(Policy(8, 0.25, 2), assistant_model=small)
    model.generate(ids, custom_generate=asd)

Transformers' own loop drafts, verifies and commits. Before it takes the argmax of a row, a last logits processor raises
the draft token there if the rule accepts it, and the loop then finds a match. Scores that ``generate`` returns show the
raised values. B = 0 leaves every row as it is.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList

from ...errors import EngineError
from ...records import FORBIDDEN_LOGIT
from ...rules.asd import ACCEPT, judge_of, settle_of
from ...rules.settings import Policy
from ..accept import Blocks, needs_of, read_rows, score_blocks
from ..config import read_policy_file
from ..ledger import Report


class Lift(LogitsProcessor):
    """Decide row by row about the block that was drafted last, and raise what is accepted.

    Attributes
    ----------
    spent : float
        Ledger s of the request, in logits; the running block is not in it.
    """

    def __init__(self, policy: Policy, limit: int, stop_ids: set[int]) -> None:
        self.policy, self.limit, self.stop_ids = policy, limit, stop_ids
        self.spent = 0.0
        self.steps = self.drafted = self.accepted = self.relaxed = 0
        self._judge = judge_of(policy.reading)
        self._settle = settle_of(policy.semantics)
        self._begin: int | None = None
        self._draft: list[int] = []
        self._reach = 0
        self._charge, self._count, self._open = 0.0, 0, False

    def start(self, length: int, draft: list[int]) -> None:
        """Begin a block: ``length`` tokens stand before it, and ``limit`` is the longest sequence allowed."""
        if self._begin is not None:
            self.finish(length)
        self._begin, self._draft = length, draft
        self._reach = min(len(draft), self.limit - length)
        for i in range(self._reach):
            if draft[i] in self.stop_ids:
                self._reach = i + 1
                break
        self._charge, self._count, self._open = 0.0, 0, True
        self.steps += 1
        self.drafted += len(draft)

    def finish(self, length: int, last: int | None = None) -> None:
        """Enter the last block into the ledger; ``length`` tokens stand there now, ``last`` the last of all."""
        assert self._begin is not None
        new = length - self._begin
        whole = new == self._reach and new > 0 and last == self._draft[new - 1]  # cut before the target's own token
        self.accepted += new if whole else max(new - 1, 0)
        self.spent = self._settle(self.spent, self._charge)
        self.relaxed += self._count
        self._charge, self._count = 0.0, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return one row (1, V), raised at the draft token where the rule accepts a mismatch."""
        assert self._begin is not None
        i, width = input_ids.shape[1] - self._begin, len(self._draft)
        if not self._open or i >= self._reach:
            return scores
        token = torch.tensor([self._draft[i]], device=scores.device)
        layout = self.policy.layout
        rows = read_rows(scores, token, layout)
        best = float(rows.best)
        if not math.isfinite(best) or best <= FORBIDDEN_LOGIT:
            kind = "NaN" if math.isnan(best) else "+inf" if best > 0 else "nothing but -inf"
            raise EngineError(
                f"the target's logits hold {kind}", where=f"sequence position {input_ids.shape[1]}",
                fix="check the weights, or use a wider dtype",
            )  # fmt: skip
        only = (torch.arange(width, device=scores.device) == i)[None, :]
        blocks = Blocks(torch.tensor([width], device=scores.device), only, torch.zeros_like(only, dtype=torch.int64))
        mismatch, score, charge = (grid[0, i].item() for grid in score_blocks(layout, rows, blocks))
        if not mismatch:
            if rows.argmax_ids.item() != self._draft[i]:  # a tie, which this reading takes for a match
                return self._raised(scores, token)
            return scores
        total = self._charge + charge
        policy = self.policy
        numbers = self.spent, policy.budget, policy.gate, policy.cap
        if self._judge(score, self._charge, total, self._count + 1, *numbers) != ACCEPT:
            self._open = False
            return scores
        self._charge, self._count = total, self._count + 1
        return self._raised(scores, token)

    def _raised(self, scores: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, token, torch.finfo(scores.dtype).max / 2)


class Watched:
    """A candidate generator whose drafts are shown to a :class:`Lift`."""

    def __init__(self, generator: Any, lift: Lift) -> None:
        self._generator, self._lift = generator, lift

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def get_candidates(self, input_ids: torch.Tensor, **more: Any) -> Any:
        """Return what the generator drafts."""
        ids, logits = self._generator.get_candidates(input_ids, **more)
        if ids.shape[0] != 1:
            raise EngineError("a tree of drafts cannot be verified", fix="use a drafter that proposes one sequence")
        self._lift.start(input_ids.shape[1], ids[0, input_ids.shape[1] :].tolist())
        return ids, logits


class Disguised:
    """A model whose candidate generator is watched; everything else is the model's own, which stays as it is."""

    def __init__(self, model: Any, lift: Lift, plain: LogitsProcessorList) -> None:
        self._model, self._lift, self._plain = model, lift, plain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *positional: Any, **named: Any) -> Any:
        return self._model(*positional, **named)

    def _get_candidate_generator(self, **named: Any) -> Watched:
        # Look-up runs the processors by itself, to find forbidden tokens: it gets the list without the lift.
        named["logits_processor"] = self._plain
        return Watched(self._model._get_candidate_generator(**named), self._lift)


class Assisted:
    """Assisted generation under a setting of ASD, for ``generate(custom_generate=...)``.

    Parameters
    ----------
    policy : Policy or path
        A setting, or a file that ``asdsim calibrate`` wrote.
    assistant_model : transformers.PreTrainedModel, optional
        Drafts; named here, since ``generate`` does not hand it to a function of one's own.
    request_id : str
        For the report.

    Attributes
    ----------
    report : Report or None
        What became of the last request.
    """

    def __init__(self, policy: Policy | str | Path, assistant_model: Any = None, request_id: str = "") -> None:
        self.policy = policy if isinstance(policy, Policy) else read_policy_file(policy)[0]
        self.assistant_model, self.request_id = assistant_model, request_id
        self.report: Report | None = None
        layout = self.policy.layout
        needs_of(layout)
        if layout.value == "reuse" or layout.rule == "fly":
            raise EngineError(
                f"{layout} looks at rows behind a mismatch, and Transformers shows one row at a time",
                fix="use another value scheme or rule",
            )

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        **named: Any,
    ) -> Any:
        """Decode one request; called by ``generate``.

        Raises
        ------
        EngineError
            Under sampling, with several sequences at once, without a drafter, or where the logits are no numbers.
        """
        if generation_config.do_sample:
            raise EngineError("ASD verifies greedy decoding", fix="set do_sample=False")
        if input_ids.shape[0] != 1 or generation_config.num_beams != 1:
            raise EngineError(
                "assisted generation takes one sequence at a time", fix="give a batch of one, num_beams=1"
            )
        if generation_config.assistant_ensemble_weight is not None:
            raise EngineError("assistant_ensemble_weight mixes the drafter into the target", fix="leave it out")
        assistant = named.pop("assistant_model", None) or self.assistant_model
        config = generation_config
        drafting = (config.prompt_lookup_num_tokens, config.assistant_early_exit, getattr(config, "use_mtp", None))
        if assistant is None and not any(drafting):
            raise EngineError(
                "nothing drafts", fix="give Assisted an assistant_model, or generate prompt_lookup_num_tokens"
            )
        eos = getattr(config, "_eos_token_tensor", None)
        lift = Lift(self.policy, config.max_length, set() if eos is None else set(eos.flatten().tolist()))
        plain = LogitsProcessorList(logits_processor or [])
        disguised = Disguised(model, lift, plain)
        done = type(model)._assisted_decoding(
            disguised, input_ids, LogitsProcessorList([*plain, lift]), stopping_criteria, config,
            assistant_model=assistant, **named,
        )  # fmt: skip
        ids = done if isinstance(done, torch.Tensor) else done.sequences
        lift.finish(ids.shape[1], int(ids[0, -1]))
        tokens = int(ids.shape[1] - input_ids.shape[1])
        self.report = Report(
            self.request_id,
            self.policy,
            tokens,
            lift.steps,
            lift.drafted,
            lift.accepted,
            lift.relaxed,
            lift.spent,
        )
        return done
