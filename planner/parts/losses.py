"""Losses of the tasks.

Each is a micro-batch's part of the mean over the effective batch: its sum, divided by ``items``, the count over the
whole effective batch. So how a batch is cut into micro-batches doesn't change the result.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits: Tensor, labels: Tensor, items: float, weights: Tensor | None = None) -> Tensor:
    """Over the labels that are not -100; `weights` of a text's segments add up to one.

    The logits are freed on return: the backward pass needs their log-softmax alone.
    """
    logits = logits.float()  # frees logits in a lower precision
    if weights is not None:
        return (F.cross_entropy(logits, labels, reduction="none") * weights).sum() / items
    return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1), reduction="sum") / items


def binary_cross_entropy(logits: Tensor, labels: Tensor, items: float, weights: Tensor | None = None) -> Tensor:
    """Over every label of every text: labels [texts, labels], each from 0 to 1."""
    weights = None if weights is None else weights.unsqueeze(-1)
    return F.binary_cross_entropy_with_logits(logits.float(), labels, weights, reduction="sum") / items


def squared_error(logits: Tensor, labels: Tensor, items: float, weights: Tensor | None = None) -> Tensor:
    """Of a number for each text: labels [texts, 1]."""
    if weights is None:
        return F.mse_loss(logits.float(), labels, reduction="sum") / items
    return (F.mse_loss(logits.float(), labels, reduction="none") * weights.unsqueeze(-1)).sum() / items


def mean_pool(hidden: Tensor, mask: Tensor) -> Tensor:
    """Mean of each text's token states in fp32, of length one: [texts, width]."""
    summed = torch.bmm(mask.unsqueeze(1).to(hidden.dtype), hidden).squeeze(1)  # no product as large as the states
    return F.normalize(summed.float(), dim=-1)  # the count of tokens doesn't change a direction


def contrastive_loss(embeddings: Tensor, texts: int, temperature: float = 0.05) -> Tensor:
    """Each first text has to find its own partner among all others: mean over the pairs.

    `embeddings` [samples * texts, width]: the samples' first texts, then their partners, then (if there are three)
    texts that are no partners. Multiple negatives ranking loss (Henderson et al. 2017, arXiv:1705.00652).
    """
    samples = len(embeddings) // texts
    scores = embeddings[:samples] @ embeddings[samples:].T / temperature
    return F.cross_entropy(scores, torch.arange(samples, device=scores.device))
