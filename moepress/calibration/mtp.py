"""The MTP layer: a decoder layer that predicts one token further, run with its own inputs.

    h′_t = eh_proj([enorm(embed(token_{t+1})) ; hnorm(h_t)])        t = 0 … S − 2
    out  = decoder layer N (attention over h′, routed experts of its own)
    logits of token_{t+2} = lm_head(shared_head.norm(out_t))

h is the main model's output after its final norm. Sources: DeepSeek-V3 report (arXiv 2412.19437, section 2.2), SGLang
0.5.23 srt/models/deepseek_nextn.py (concatenation order, shared embedding and head, hidden states after the norm) and
transformers 5.17 modeling_layers.py:MtpLayer, which agree. The last token of a sample has no next token, so the stream
is one shorter. Positions count from 0, as SGLang's do; transformers counts from 1, which rotary attention cannot tell.

The embedding and head that DeepSeek and GLM-4.5 repeat inside the MTP layer are copies of the main model's and are not
read. With the input stream made, everything else (tap, statistics, KV cache) works as for any other layer.
"""

from __future__ import annotations

import torch
from torch import nn

from moepress.calibration.layer_fill import fill, on_meta
from moepress.calibration.stream import Stream
from moepress.calibration.streamed_model import StreamedModel, embed_tokens
from moepress.quantize.side_by_side import side_by_side, width_on


@torch.no_grad()
def mtp_stream(model: StreamedModel, index: int, token_ids: torch.Tensor, previous: Stream) -> Stream:
    """The input of an MTP layer; ``model.open_layer(index)`` is then run on it like any other.

    Args:
        model: the main model.
        index: one of ``model.mtp_layers``.
        token_ids: [N, S] int64, as the main model was given them.
        previous: the main model's finished stream (``model.finish``), [N, S, C]; for a further MTP layer the stream of
            the one before, after `finish_mtp`. It is only read.

    Returns:
        A new stream, one position shorter than `previous`.

    Raises:
        CheckpointError: a weight of the MTP layer is missing or has another shape.
    """
    settings, hidden_size = model.settings, model.config.hidden_size
    samples, length = previous.hidden.shape[0], previous.hidden.shape[1] - 1
    following = token_ids[:, token_ids.shape[1] - length :]
    enorm = model.norm(model.layer_weight(index, "enorm.weight"))
    hnorm = model.norm(model.layer_weight(index, "hnorm.weight"))
    projection = on_meta(lambda: nn.Linear(2 * hidden_size, hidden_size, bias=False))
    names = {"weight": model.layer_weight(index, "eh_proj.weight")}
    fill(projection, names, model.source, device=settings.device, dtype=settings.dtype)
    table = model.embedding()
    out = model.scratch.allocate((samples, length, hidden_size), settings.dtype)

    def one(batch: tuple[int, int]) -> None:
        embedded = settings.on_device(embed_tokens(following[slice(*batch)], table))
        hidden = settings.on_device(previous.hidden.read(*batch)[:, :-1])
        out.write(batch[0], projection(torch.cat([enorm(embedded), hnorm(hidden)], dim=-1)))

    side_by_side(one, settings.dense_batches(samples, length), width_on(settings.device))
    return Stream(out, (previous.lengths - 1).clamp(min=0))


def finish_mtp(model: StreamedModel, index: int, stream: Stream) -> None:
    """The MTP layer's own final norm, in place: what lm_head (``model.logits``) is given."""
    model.normalize(stream, model.layer_weight(index, "shared_head.norm.weight"))
