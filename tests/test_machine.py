"""Training loops at random beside the slow twin of ``machine.py``; and that the machine finds what is planted."""

import pytest
import torch
from hypothesis import Phase

from foof import linalg
from foof.optim.engine import Engine
from foof.optim.step import Step
from foof.statistics import Gathered
from machine import METHODS, Mismatch, run

LOOPS = 100


@pytest.mark.parametrize("method", METHODS)
def test_the_optimizer_and_its_twin_agree(method):
    run(method, LOOPS // len(METHODS))


def zero_grad_drops_nothing(patch):
    patch.setattr(Engine, "drop", lambda self: None)
    patch.setattr(Step, "_drop_lost", lambda self: None)


def gradients_set_to_none_are_not_missed(patch):
    """The optimizer's own ``zero_grad`` does drop; the model's goes unnoticed."""
    patch.setattr(Step, "_drop_lost", lambda self: None)


def the_batch_is_folded_in_before_the_inversion(patch):
    @torch.no_grad()
    def commit(self):
        ledgers, self.ledgers, self.plain_gradients = self.ledgers, {}, []
        if ledgers:
            self.estimator.finish(self, ledgers, self.schedule.gathers())
            self._fold({block: ledger.seen for block, ledger in ledgers.items()})
            if self.schedule.inverts():
                self.refresh()
            self.estimator.folded(ledgers)
            self.schedule.advance()
        self.step.commit()

    patch.setattr(Engine, "commit", commit)


def accumulated_datapoints_count_twice(patch):
    count = Gathered._count

    def twice(self, datapoints, pass_id):
        new = self.of_pass and pass_id not in self.of_pass
        count(self, 2 * datapoints if new else datapoints, pass_id)

    patch.setattr(Gathered, "_count", twice)


def jitter_is_added(patch):
    add = linalg.add_damping
    patch.setattr(linalg, "add_damping", lambda S, damping: add(S, damping + 1e-7 * S.diagonal(dim1=-2, dim2=-1).mean(-1)))


def autograd_grad_feeds_the_statistics(patch):
    ledger = Step.ledger
    patch.setattr(Step, "ledger", lambda self, block, pass_id, lands: ledger(self, block, pass_id, True))


MUTATIONS = [
    (mutate, method)
    for mutate in (
        zero_grad_drops_nothing, gradients_set_to_none_are_not_missed, the_batch_is_folded_in_before_the_inversion,
        accumulated_datapoints_count_twice, jitter_is_added,
    )
    for method in ("foof", "kfac")
] + [(autograd_grad_feeds_the_statistics, "foof")]  # fmt: skip


@pytest.mark.parametrize(("mutate", "method"), MUTATIONS, ids=lambda each: each if isinstance(each, str) else each.__name__)
def test_what_is_planted_is_found(mutate, method, monkeypatch):
    """Within as many loops as every run of the tests has; without looking for a shorter one."""
    mutate(monkeypatch)
    with pytest.raises(Mismatch):
        run(method, LOOPS, phases=[Phase.generate], report_multiple_bugs=False)
