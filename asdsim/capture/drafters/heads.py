"""Draft heads: small networks that read the target's hidden states.

Notation: the prefix is x_0..x_n; its last token x_n, the anchor, is committed but not yet run through the target, so
hidden states exist for positions 0..n-1. They come from the verification pass itself: the session that verifies keeps
them, and what it has not run yet (the prompt at first) it runs then and not again.

A head sees true states at accepted positions only; what it builds on its own states is dropped after each proposal. So
a proposal is a function of the prefix. A prefix of one token has no states, and no draft.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch

from ...engines.protocol import Drafter, DrafterSession, ManyProposer, ManyScorer, Proposal, TargetSession
from ...engines.transformers.forward import common_prefix
from ...engines.transformers.kvpool import KVPool
from ...engines.transformers.model import config_sha256
from ...engines.transformers.place import device_of, whole
from ...errors import CaptureError, UsageError
from ...files import Fields
from ..loop import check_width
from .configuration import refuse_unread
from .formats import Checkpoint, check_dtypes, marked_tokens, need, read_checkpoint, whole_map

CLASSES = {"medusa": "Medusa", "eagle3": "Eagle3", "dspark": "DSpark"}
"""Kinds of heads: module beside this one, and the class in it."""


class Head(torch.nn.Module):
    """A draft head.

    Attributes
    ----------
    kind : str
        Key of :data:`CLASSES`.
    taps : tuple of int
        Hidden states of the target that it reads: 0 the embeddings, i what layer i - 1 puts out, L behind the final
        norm.
    hidden_size : int
        d of the target.
    vocab_size : int
        Width of the target's logit rows.
    max_draft_tokens : int or None
        Largest K, None where there is no limit.
    token_ids : int64 tensor (V_d,) or None
        What the head can draft, where that is not all.
    trained_positions : int or None
        Longest sequence that the head was made for, None where it does not say.
    """

    kind: str
    taps: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    max_draft_tokens: int | None = None
    token_ids: torch.Tensor | None
    trained_positions: int | None = None

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, target_model: Any, **overrides: Any) -> Head:
        """Build the head for a target, in its dtype and on its device; only look at the files for a :class:`Claimed`.

        Raises
        ------
        CaptureError
            If the checkpoint was made for another hidden size or vocabulary, is incomplete, or leaves open what an
            override must say.
        """
        raise NotImplementedError

    def memory(self) -> Any:
        """Return an empty memory for one sequence, see :class:`.blocks.Memory`; None for a head without one."""
        return None

    def draft(
        self, ids: list[int], states: torch.Tensor, memory: Any, num_draft_tokens: int
    ) -> tuple[list[int], torch.Tensor]:
        """Draft greedily.

        Parameters
        ----------
        ids : list of int (n + 1,)
            The prefix, anchor included; n >= 1.
        states : tensor (n, taps x d)
            True states of positions 0..n-1, in the order of ``taps``.
        memory : Memory or None
            Entries of a prefix of ``ids``. Extended by the true ones that are missing; nothing else stays in it.
        num_draft_tokens : int
            K.

        Returns
        -------
        list of int (k,), tensor (k, V_d)
            k <= K tokens and their logit rows over what the head can draft; each token is the best of its row.
        """
        raise NotImplementedError

    def draft_many(
        self, ids: list[list[int]], states: list[torch.Tensor], num_draft_tokens: int, pool: KVPool | None = None
    ) -> list[tuple[list[int], torch.Tensor]]:
        """Draft for unrelated prefixes in one batch, behind the entries that ``pool`` holds; from scratch where None.

        Parameters and results are those of :meth:`draft`, for each prefix. True entries go into the pool.
        """
        if pool is None:
            pool = KVPool(Entries(self, states[0].device), 0)
        lag = self.memory().lag
        rows = [prefix[: len(given) + lag] for prefix, given in zip(ids, states, strict=True)]
        held = [pool.known(row, len(row) - 1) for row in rows]
        memory, tokens, mask, _ = pool.start(rows, held)
        padded = states[0].new_zeros((*tokens.shape, states[0].shape[-1]))
        for row, given, slots in zip(padded, states, held, strict=True):
            fresh = given[max(0, len(slots) - lag) :]
            row[-len(fresh) :] = fresh
        anchors = torch.tensor([prefix[-1] for prefix in ids], device=mask.device)
        places = mask.cumsum(-1) * mask - 1 - lag
        drafts = self.draft_behind(tokens, padded, places, memory, anchors, num_draft_tokens)
        ends = mask.shape[1]
        pool.store(memory, rows, held, [ends - len(row) + len(slots) for row, slots in zip(rows, held, strict=True)])
        return drafts

    def draft_behind(
        self, tokens: torch.Tensor, states: torch.Tensor, places: torch.Tensor, memory: Any, anchors: torch.Tensor,
        num_draft_tokens: int,
    ) -> list[tuple[list[int], torch.Tensor]]:  # fmt: skip
        """Draft for a batch, padded on the left.

        Parameters
        ----------
        tokens : int64 (batch, m)
            Last tokens that new entries depend on.
        states : tensor (batch, m, taps x d)
            Last states that they depend on.
        places : int64 (batch, held + m)
            Positions of all entries; negative ones are padding, which nothing looks at. The last one is true.
        memory : Memory
            The entries that are held. Extended by the new ones; only drafts may stand behind these.
        anchors : int64 (batch,)
        num_draft_tokens : int
        """
        raise NotImplementedError

    def tokens_of(self, best: torch.Tensor) -> torch.Tensor:
        """Return the tokens that columns of a row stand for."""
        return best if self.token_ids is None else self.token_ids[best]

    def over_vocabulary(self, rows: torch.Tensor) -> torch.Tensor:
        """Return logit rows (.., V) of the target's vocabulary from rows (.., V_d); -inf for what the head lacks."""
        if self.token_ids is None:
            return rows
        full = rows.new_full((*rows.shape[:-1], self.vocab_size), -torch.inf)
        return full.index_copy_(-1, self.token_ids, rows)


class HeadSession(DrafterSession):
    """One request at a head, beside the session that verifies it."""

    def __init__(self, head: Head, target_session: TargetSession, keep_logits: bool) -> None:
        self._head, self._beside, self._keep_logits = head, target_session, keep_logits
        self._memory = head.memory()
        self._ids: list[int] = []  # what the memory was built for

    def fork_beside(self, target_session: TargetSession) -> HeadSession:
        """Return an independent session that reads from ``target_session``."""
        twin = HeadSession(self._head, target_session, self._keep_logits)
        twin._memory, twin._ids = copy.deepcopy(self._memory), self._ids[:]
        return twin

    def fork(self) -> HeadSession:
        """Return an independent session beside a fork of the target's."""
        return self.fork_beside(self._beside.fork())

    @torch.inference_mode()
    def propose(self, prefix_ids: Sequence[int], num_draft_tokens: int) -> Proposal:
        """Return at most ``num_draft_tokens`` tokens."""
        ids = list(prefix_ids)
        states = self._beside.states(ids[:-1], self._head.taps)
        if len(ids) < 2:
            return Proposal([])
        if self._memory is not None:
            self._memory.crop(common_prefix(self._ids, ids))
        tokens, rows = self._head.draft(ids, states, self._memory, num_draft_tokens)
        self._ids = ids
        return proposal_of(self._head, tokens, rows, self._keep_logits)


def proposal_of(head: Head, tokens: list[int], rows: torch.Tensor, keep_logits: bool) -> Proposal:
    """Return a proposal with log-probabilities over what the head can draft, from rows (k, V_d)."""
    wide = rows.float()
    logprobs = wide.amax(-1) - wide.logsumexp(-1)  # a head drafts greedily: its tokens are the best of their rows
    return Proposal(tokens, logprobs.cpu().numpy(), head.over_vocabulary(rows) if keep_logits else None)


class HeadDrafter(Drafter):
    """A draft head on a target.

    Parameters
    ----------
    head : Head
        In the target's dtype, on its device.
    target : HFTarget
        Its hidden states are tapped from now on.
    name : str
        As on the command line.
    keep_logits : bool
        Hand the logit rows over with each proposal, for divergences.
    identity : dict, optional
        More for the manifest.
    """

    has_logits = True
    reads_target = True

    def __init__(
        self, head: Head, target: Any, name: str, keep_logits: bool = False, identity: Mapping[str, Any] | None = None
    ) -> None:
        self.head, self.target, self.name, self.keep_logits = head.eval(), target, name, keep_logits
        self.vocab_size = head.vocab_size
        self.max_draft_tokens, self.trained_positions = head.max_draft_tokens, head.trained_positions
        self._identity = dict(identity or {})
        target.tap(head.taps)

    def session(self, prompt_ids: Sequence[int]) -> HeadSession:
        """Return a session with a target session of its own."""
        return self.session_beside(prompt_ids, self.target.session(prompt_ids))

    def session_beside(self, prompt_ids: Sequence[int], target_session: TargetSession) -> HeadSession:
        """Return a session that reads from the one that verifies."""
        return HeadSession(self.head, target_session, self.keep_logits)

    def propose_many(self, prefixes: Sequence[Sequence[int]], num_draft_tokens: int) -> list[Proposal]:
        """Propose for unrelated prefixes in one batch, states computed from scratch."""
        return HeadBatch(self, self.target).propose_many(prefixes, num_draft_tokens)

    def pooled(self, max_bytes: int) -> ManyProposer:
        """Return a ``propose_many`` with a pool of target states of its own."""
        return self.pooled_beside(self.target.pooled(max_bytes), max_bytes)

    def pooled_beside(self, target: ManyScorer, max_bytes: int) -> HeadBatch:
        """Return a ``propose_many`` that reads from the target of the batch, and keeps entries within its bound."""
        return HeadBatch(self, target, max_bytes)

    def describe(self) -> dict[str, Any]:
        """Return kind, hidden states read, largest K and dtype, beside what the checkpoint says of itself."""
        return {
            "name": self.name,
            "kind": self.head.kind,
            **self._identity,
            "taps": list(self.head.taps),
            "max_draft_tokens": self.head.max_draft_tokens,
            "dtype": self.target.dtype,
            "vocab_size": self.vocab_size,
        }


class Entries:
    """What a :class:`KVPool` asks of a model, for the entries of a head."""

    taps: tuple[int, ...] = ()
    states: torch.Tensor | None = None

    def __init__(self, head: Head, device: torch.device) -> None:
        self.new_cache, self.device = head.memory, device


class HeadBatch:
    """``propose_many`` of a head, with the hidden states of a target that scores in batches."""

    def __init__(self, drafter: HeadDrafter, target: Any, max_bytes: int = 0) -> None:
        self._drafter, self._target = drafter, target
        entries = Entries(drafter.head, drafter.target.lm.device)
        self._pool = KVPool(entries, max_bytes, getattr(target, "pool", None))

    @torch.inference_mode()
    def propose_many(self, prefixes: Sequence[Sequence[int]], num_draft_tokens: int) -> list[Proposal]:
        """Propose for unrelated prefixes in one batch."""
        head, keep = self._drafter.head, self._drafter.keep_logits
        rows = [list(prefix) for prefix in prefixes]
        states = self._target.states_many([row[:-1] for row in rows], head.taps)
        some = [n for n, row in enumerate(rows) if len(row) > 1]
        proposals = [Proposal([]) for _ in rows]
        if some:
            drafts = head.draft_many([rows[n] for n in some], [states[n] for n in some], num_draft_tokens, self._pool)
            for n, (tokens, logits) in zip(some, drafts, strict=True):
                proposals[n] = proposal_of(head, tokens, logits, keep)
        return proposals


def check_files(
    kind: str,
    name: str,
    *,
    num_draft_tokens: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    revision: str | None = None,
    offline: bool = False,
) -> Checkpoint:
    """Read a checkpoint and refuse all that its files alone can tell, without its target.

    Other parameters and errors are those of :func:`load_head`.

    Parameters
    ----------
    num_draft_tokens : int, optional
        K, which must be one that the head can draft.
    """
    checkpoint = _read_kind(kind, name, revision, offline)
    head = head_class(kind).from_checkpoint(checkpoint, Claimed(checkpoint), **_said(overrides))
    if num_draft_tokens is not None:
        check_width(f"{kind}:{name}", head.max_draft_tokens, num_draft_tokens)
    return checkpoint


def load_head(
    kind: str,
    name: str,
    target: Any,
    *,
    keep_logits: bool = False,
    overrides: Mapping[str, Any] | None = None,
    checkpoint: Checkpoint | None = None,
    revision: str | None = None,
    offline: bool = False,
) -> HeadDrafter:
    """Return the drafter that a checkpoint holds.

    Parameters
    ----------
    kind : str
        Key of :data:`CLASSES`, as asked for.
    name : str
        File, directory or hub repository.
    target : HFTarget
    keep_logits : bool
    overrides : mapping, optional
        See :data:`asdsim.capture.drafters.FLAGS`; None values count as not given.
    checkpoint : Checkpoint, optional
        What was read of it before.
    revision, offline
        See :func:`.formats.read_checkpoint`.

    Raises
    ------
    CaptureError, UsageError
        If it cannot be read, is of another kind, or does not fit the target.
    """
    checkpoint = checkpoint or _read_kind(kind, name, revision, offline)
    given = _said(overrides)
    head = head_class(kind).from_checkpoint(checkpoint, target.model, **given)
    identity = {
        "checkpoint": name,
        "revision": checkpoint.revision,
        "weights_sha256": checkpoint.sha256,
        "config_sha256": config_sha256(checkpoint.config),
        "overrides": {key: list(value) if isinstance(value, tuple) else value for key, value in given.items()},
    }
    return HeadDrafter(head, target, f"{kind}:{name}", keep_logits, identity)


def _said(overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    return {key: value for key, value in (overrides or {}).items() if value is not None}


def _read_kind(kind: str, name: str, revision: str | None, offline: bool) -> Checkpoint:
    checkpoint = read_checkpoint(name, revision=revision, offline=offline)
    refuse_unread(checkpoint)  # first: a quantised head may look like none
    if checkpoint.kind != kind:
        raise UsageError(
            f"this is a head of kind {checkpoint.kind}, not {kind}",
            where=name,
            fix=f"write --drafter {checkpoint.kind}:{name}",
        )
    return checkpoint


def head_class(kind: str) -> type[Head]:
    """Return the class of a kind of heads."""
    loaded: type[Head] = getattr(import_module(f".{kind}", __package__), CLASSES[kind])
    return loaded


def output_head(target_model: Any) -> Any:
    """Return the target's last projection."""
    return target_model.get_output_embeddings()


def target_shape(target_model: Any) -> tuple[int, int, int]:
    """Return hidden size d, vocabulary V and layers L of a target."""
    config = target_model.config.get_text_config()
    width = int(target_model.get_input_embeddings().weight.shape[1])
    return width, int(output_head(target_model).weight.shape[0]), int(config.num_hidden_layers)


def check_size(checkpoint: Checkpoint, what: str, of_head: int, of_target: int) -> None:
    """Refuse a head made for a target of another size."""
    if of_head != of_target:
        raise checkpoint.error(
            f"the head was made for {what} {of_head}, the target has {of_target}", "use the head made for this target"
        )


class Claimed:
    """Stands for the target that a checkpoint was made for: shapes as its files claim them, and no weights.

    A head is built for it to find what is wrong with the files before a target is loaded. How many layers the target
    has is not known.
    """

    device, dtype = torch.device("meta"), torch.float32
    num_hidden_layers = 1 << 20

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.config = self
        width, vocab_size = _claimed_width(checkpoint), _claimed_vocabulary(checkpoint)
        with torch.device("meta"):
            self._embedding = torch.nn.Embedding(vocab_size, width)
            self._output = torch.nn.Linear(width, vocab_size, bias=False)

    def get_text_config(self) -> Claimed:
        """Return what tells the number of layers."""
        return self

    def get_input_embeddings(self) -> torch.nn.Embedding:
        """Return the token embedding."""
        return self._embedding

    def get_output_embeddings(self) -> torch.nn.Linear:
        """Return the last projection."""
        return self._output


def _claimed_width(checkpoint: Checkpoint) -> int:
    named = checkpoint.fields("target_hidden_size").whole("target_hidden_size", 0, least=1, most=1 << 20)
    if named:
        return named
    fc = checkpoint.tensors.get("fc.weight", checkpoint.tensors.get("model.fc.weight"))
    if fc is None or fc.ndim != 2 or not fc.numel():
        square = [t for t in checkpoint.tensors.values() if t.ndim == 2 and t.shape[0] == t.shape[1]]
        return int(square[0].shape[0]) if square else 1
    return int(fc.shape[0] if fc.shape[1] % fc.shape[0] == 0 else fc.shape[1] // 3)


def _claimed_vocabulary(checkpoint: Checkpoint) -> int:
    """Return the vocabulary that the configuration or a tensor names; more than any where none does."""
    named = checkpoint.layer.whole("vocab_size", 0, least=1, most=1 << 31)
    if named:
        return named
    tensors = {name.removeprefix("model."): tensor for name, tensor in checkpoint.tensors.items()}
    for name in ("embed_tokens.weight", "markov_head.markov_w1.weight", "t2d"):
        if name in tensors and tensors[name].ndim:
            return len(tensors[name])
    outputs = re.compile(r"lm_head\.weight|lm_heads\.\d+\.weight|(medusa_head\.)?\d+\.\d+\.weight")
    rows = [len(tensor) for name, tensor in tensors.items() if outputs.fullmatch(name) and tensor.ndim]
    return max(rows) if rows and not {"d2t", "token_map"} & tensors.keys() else 1 << 31


def vocabulary_of(
    checkpoint: Checkpoint,
    tensors: Mapping[str, torch.Tensor],
    maps: Mapping[str, torch.Tensor],
    embeddings: Sequence[str],
    width: int,
    target_model: Any,
) -> torch.Tensor | None:
    """Check a head's vocabularies against the target's; return its draft vocabulary, see :func:`draft_vocabulary`.

    Parameters
    ----------
    checkpoint : Checkpoint
    tensors, maps : mapping of str to tensor
        Weights, and ``d2t`` and ``t2d``.
    embeddings : sequence of str
        Tensors with a row for each token of the target.
    width : int
        Hidden size of the head.
    target_model : transformers.PreTrainedModel
    """
    target_width, vocab_size, _ = target_shape(target_model)
    named = checkpoint.layer.whole("vocab_size", 0, least=1)
    sizes = {"config.json": named} if named else {}
    sizes |= {"t2d": len(maps["t2d"])} if maps.get("t2d") is not None and maps["t2d"].ndim else {}
    sizes |= {name: len(need(checkpoint, tensors, name)) for name in embeddings if name in tensors}
    if len(set(sizes.values())) > 1:
        counts = ", ".join(f"{size} in {place}" for place, size in sizes.items())
        raise checkpoint.error(f"its files disagree on the size of the vocabulary: {counts}")
    for size in sizes.values():
        check_size(checkpoint, "vocabulary", size, vocab_size)
    output = need(checkpoint, tensors, "lm_head.weight") if "lm_head.weight" in tensors else None
    token_ids = draft_vocabulary(checkpoint, maps, output, vocab_size)
    drafted = checkpoint.fields("draft_vocab_size").whole("draft_vocab_size", 0, least=1)
    if drafted and drafted != (vocab_size if token_ids is None else len(token_ids)):
        if token_ids is None:
            raise checkpoint.error(f"draft_vocab_size is {drafted}, but d2t, which names these tokens, is missing")
        raise checkpoint.error(f"draft_vocab_size is {drafted}, but the maps name {len(token_ids)} tokens")
    for name in ("embed_tokens", "lm_head"):
        if f"{name}.weight" not in tensors and width != target_width:
            raise checkpoint.error(f"tensor {name}.weight is missing, and the target's does not fit")
    return token_ids


def draft_vocabulary(
    checkpoint: Checkpoint, maps: Mapping[str, torch.Tensor], output: torch.Tensor | None, vocab_size: int
) -> torch.Tensor | None:
    """Return the token of each draft row: j + d2t[j], by ``t2d`` where there is no ``d2t``; None for all tokens."""
    token_ids = marked = None
    if "t2d" in maps:
        marked = marked_tokens(checkpoint, maps["t2d"])
    if "d2t" in maps:
        offsets = whole_map(checkpoint, "d2t", maps["d2t"])
        token_ids = torch.arange(len(offsets)) + offsets
        if marked is not None and not torch.equal(marked, token_ids):
            raise checkpoint.error("d2t and t2d name different draft vocabularies")
    elif marked is not None:
        token_ids = marked
    rows = None if output is None else output.shape[0]
    if token_ids is None:
        if rows is not None and rows != vocab_size:
            raise checkpoint.error(f"lm_head has {rows} rows, the target {vocab_size} tokens, and d2t is missing")
        return None
    check_token_ids(checkpoint, token_ids, vocab_size)
    if rows is not None:
        check_size(checkpoint, "a draft vocabulary of", len(token_ids), rows)
    return token_ids


def tied(checkpoint: Checkpoint, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors with the head's own embedding as its projection, where the configuration ties the two."""
    embedding, output = tensors.get("embed_tokens.weight"), tensors.get("lm_head.weight")
    top = Fields(checkpoint.config, checkpoint.where, CaptureError)  # in a table it is the target's
    if not top.flag("tie_word_embeddings", False) or embedding is None:
        return tensors
    if output is not None and not torch.equal(embedding, output):
        raise checkpoint.error("tie_word_embeddings is true, but embed_tokens.weight and lm_head.weight differ")
    return {**tensors, "lm_head.weight": embedding}


def fill(head: Head, checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor], target_model: Any) -> Any:
    """Load tensors into a head built on "meta", all of them and no other, in the target's dtype and on its device.

    Raises
    ------
    CaptureError
        Naming the first tensor that is missing, left over, of another shape or quantised.
    """
    check_dtypes(checkpoint, tensors)
    wanted = head.state_dict()
    for name in sorted(wanted.keys() | tensors.keys()):
        if name not in tensors:
            raise checkpoint.error(f"tensor {name} is missing")
        if name not in wanted:
            raise checkpoint.error(f"tensor {name} does not belong in a {head.kind} head")
        if wanted[name].shape != tensors[name].shape:
            raise checkpoint.error(
                f"tensor {name} is {tuple(tensors[name].shape)}, not {tuple(wanted[name].shape)}",
            )
    device = device_of(target_model.get_input_embeddings())  # gets the states, see LanguageModel
    if device.type == "meta":
        return head
    place = {"device": device, "dtype": target_model.dtype}
    head.load_state_dict({name: tensor.to(**place) for name, tensor in tensors.items()}, assign=True)
    return head.to(device).eval()


class Borrowed:
    """Parts of the target that a head uses without owning them: they are not among its parameters.

    Parameters
    ----------
    target_model : transformers.PreTrainedModel
    token_ids : int64 tensor (V_d,), optional
        Rows of the projection that are wanted; all where None.
    """

    def __init__(self, target_model: Any, token_ids: torch.Tensor | None = None) -> None:
        self.embedding = target_model.get_input_embeddings()
        self.output = output_head(target_model)
        if token_ids is not None:
            self.output = _rows(self.output, token_ids)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return embeddings (.., d) of tokens (..,), where the tokens are."""
        embedded: torch.Tensor = self.embedding(tokens.to(device_of(self.embedding)))
        return embedded.to(tokens.device)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logit rows (.., V_d) of states (.., d), where the states are."""
        rows: torch.Tensor = self.output(hidden.to(device_of(self.output)))
        return rows.to(hidden.device)


def _rows(output: Any, token_ids: torch.Tensor) -> torch.nn.Linear:
    weight, bias = whole(output, "weight"), whole(output, "bias")
    rows = torch.nn.Linear(weight.shape[1], len(token_ids), bias=bias is not None, device="meta")
    rows.weight = torch.nn.Parameter(weight[token_ids.to(weight.device)], requires_grad=False)
    if bias is not None:
        rows.bias = torch.nn.Parameter(bias[token_ids.to(weight.device)], requires_grad=False)
    return rows


def check_token_ids(checkpoint: Checkpoint, token_ids: torch.Tensor, vocab_size: int) -> None:
    """Refuse a draft vocabulary with tokens that the target lacks, or with one twice."""
    lowest, highest = int(token_ids.min()), int(token_ids.max())
    if lowest < 0 or highest >= vocab_size:
        token = lowest if lowest < 0 else highest
        raise checkpoint.error(f"the draft vocabulary names token {token}, the target has {vocab_size}")
    if len(token_ids.unique()) != len(token_ids):
        raise checkpoint.error("the draft vocabulary names a token twice")
