"""How far a pressed model is from its source: both streamed over the same held-out text, logits never held.

    KL      = mean over tokens of Σ_v p(v) · (log p(v) − log q(v))        p: source, q: candidate, natural logarithms
    top-1   = share of tokens where both put the same token first
    ppl     = exp(mean −log p(next token)), for both

Each model runs layer by layer and leaves its final hidden states [N, S, C]. Only then do the two heads meet, for
`ROWS` tokens at a time: 512 × 163,840 logits in float32 are 0.3 GB, where all of them would be terabytes.

The last token of a sample has no next token: it counts for KL and top-1, not for perplexity. Padding does not count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn import functional

from moepress.calibration.stream import Stream
from moepress.calibration.streamed_model import ROWS, StreamedModel, heads_at_once
from moepress.errors import VerifyFailed
from moepress.quantize.side_by_side import side_by_side


@dataclass(frozen=True)
class Divergence:
    """A candidate against its source.

    Attributes:
        tokens: compared.
        kl: mean KL(source ‖ candidate), nats per token.
        kl_standard_error: of that mean, taking tokens as independent (they are not quite: read it as a lower bound).
        kl_max: the largest of any token.
        top1_agreement: share of tokens, 0 to 1.
        source_perplexity, candidate_perplexity: of the next token.
    """

    tokens: int
    kl: float
    kl_standard_error: float
    kl_max: float
    top1_agreement: float
    source_perplexity: float
    candidate_perplexity: float


def final_hidden(model: StreamedModel, token_ids: torch.Tensor, lengths: torch.Tensor | None = None) -> Stream:
    """All layers and the final norm. token_ids [N, S] int64, lengths [N] int64 or None. The caller releases it."""
    stream = model.embed(token_ids, lengths)
    for index in range(model.num_layers):
        model.run_layer(index, stream)
    model.finish(stream)
    return stream


@torch.no_grad()
def compare_models(
    source: StreamedModel, candidate: StreamedModel, token_ids: torch.Tensor, lengths: torch.Tensor | None = None
) -> Divergence:
    """Run both models over the same text and compare their next-token distributions.

    Args:
        source, candidate: models with the same vocabulary.
        token_ids: [N, S] int64, held-out text.
        lengths: [N] int64, real tokens of each sample; None = no padding.

    Raises:
        VerifyFailed: logits that are not finite.
    """
    ours, theirs = (final_hidden(model, token_ids, lengths) for model in (source, candidate))
    divergence = compare_streams(source.head(), ours, candidate.head(), theirs, token_ids)
    ours.release()
    theirs.release()
    return divergence


@torch.no_grad()
def compare_streams(
    source_head: torch.Tensor,
    source: Stream,
    candidate_head: torch.Tensor,
    candidate: Stream,
    token_ids: torch.Tensor,
) -> Divergence:
    """`compare_models` from the finished streams.

    Args:
        source_head, candidate_head: [vocabulary, C].
        source, candidate: final hidden states [N, S, C], after the norm.
        token_ids: [N, S] int64.
    """
    sums = _Sums()

    def one(part: tuple[int, slice]) -> _Sums:
        sample, rows = part
        p, q = (of.hidden.read(sample, sample + 1)[0, rows] for of in (source, candidate))
        found, following = _Sums(), token_ids[sample, rows.start + 1 : int(source.lengths[sample])]
        found.add(_log_probs(p, source_head), _log_probs(q, candidate_head), following)
        return found

    parts = [
        (sample, slice(start, min(start + ROWS, length)))
        for sample, length in enumerate(source.lengths.tolist())
        for start in range(0, length, ROWS)
    ]
    for found in side_by_side(one, parts, heads_at_once(source_head.device)):
        sums.join(found)
    return sums.finished()


class _Sums:
    def __init__(self) -> None:
        self.tokens = self.predicted = self.agreed = 0
        self.kl = self.kl_squared = self.kl_max = self.source_loss = self.candidate_loss = 0.0

    def add(self, log_p: torch.Tensor, log_q: torch.Tensor, following: torch.Tensor) -> None:
        """log_p, log_q [n, vocabulary]; following [≥ n − 1] int64: the tokens after each row, where there are any."""
        kl = functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1).double()
        self.tokens += len(kl)
        self.kl += float(kl.sum())
        self.kl_squared += float(kl.square().sum())
        self.kl_max = max(self.kl_max, float(kl.max()))
        self.agreed += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())
        targets = following[: len(kl)].to(log_p.device)[:, None]
        self.predicted += len(targets)
        self.source_loss -= float(log_p[: len(targets)].gather(1, targets).double().sum())
        self.candidate_loss -= float(log_q[: len(targets)].gather(1, targets).double().sum())

    def join(self, other: _Sums) -> None:
        """Adds what was found elsewhere."""
        for name, value in vars(other).items():
            own = getattr(self, name)
            setattr(self, name, max(own, value) if name == "kl_max" else own + value)

    def finished(self) -> Divergence:
        tokens, predicted = max(self.tokens, 1), max(self.predicted, 1)
        mean = self.kl / tokens
        variance = max(self.kl_squared / tokens - mean * mean, 0.0)
        return Divergence(
            tokens=self.tokens,
            kl=mean,
            kl_standard_error=math.sqrt(variance / tokens),
            kl_max=self.kl_max,
            top1_agreement=self.agreed / tokens,
            source_perplexity=_perplexity(self.source_loss / predicted),
            candidate_perplexity=_perplexity(self.candidate_loss / predicted),
        )


def _log_probs(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """[n, C] and [vocabulary, C] -> log-probabilities [n, vocabulary] float32."""
    log_probs = (hidden.to(head.device, head.dtype) @ head.T).float().log_softmax(-1)
    if not bool(torch.isfinite(log_probs).all()):
        raise VerifyFailed(
            "a model's logits are not finite", hint="look for the layer: moepress verify OUT --source SRC"
        )
    return log_probs


def _perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
