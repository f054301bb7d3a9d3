"""A GPT-2 trained with Lightning on neurons: interrupted and resumed, it ends with the weights of a run that was not."""

import sys
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import lightning_gpt2

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's advice on workers, loggers and batch sizes


@pytest.fixture
def steps():
    """Steps taken by all optimizers so far: so that a resumed run cannot have started over."""
    count = [0]
    handle = register_optimizer_step_post_hook(lambda *_: count.__setitem__(0, count[0] + 1))
    yield lambda: count[0]
    handle.remove()


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("name", ["foof", "adamw", "muon"])
def test_resumed_equals_uninterrupted(name, tmp_path, steps):
    straight = lightning_gpt2.main(name, epochs=2)
    all_steps = steps()
    lightning_gpt2.main(name, epochs=1, folder=tmp_path)
    resumed = lightning_gpt2.main(name, epochs=2, folder=tmp_path, resume=True)
    assert steps() == 2 * all_steps
    assert torch.equal(flat(resumed), flat(straight))


def test_it_learns():
    first, later = (lightning_gpt2.main("foof", epochs=n) for n in (1, 4))
    data = next(iter(lightning_gpt2.windows(80)[0]))[0]
    losses = [model.gpt2(input_ids=data, labels=data).loss.item() for model in (first, later)]
    assert losses[1] < 0.9 * losses[0]
