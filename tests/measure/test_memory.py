"""Bytes that tensors hold."""

import torch

from rehead.measure.memory_in_use import peak_allocated


def test_the_peak_is_what_lives_at_once():
    def run():
        first = torch.ones(1000, 100)
        second = first * 2  # two at once
        del first
        return second.add_(1).sum()

    one = 8 * 1000 * 100
    assert 2 * one <= peak_allocated(run) < 2.01 * one
    assert peak_allocated(lambda: None) == 0


def test_what_is_made_once_does_not_count():
    kept = []
    assert peak_allocated(lambda: kept or kept.append(torch.ones(1000))) < 100
