"""The same GPT-2 with the Hugging Face Trainer and with Accelerate: resumed runs end with the weights of uninterrupted ones."""

import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

import foof
from cases import flat, mlp

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import huggingface_gpt2

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", ["foof", "adamw", "muon"])
def test_trainer_resumed_equals_uninterrupted(name, tmp_path, steps):
    straight = huggingface_gpt2.main(name, steps=15)
    all_steps = steps()
    huggingface_gpt2.main(name, steps=15, folder=str(tmp_path), stop=10)
    resumed = huggingface_gpt2.main(name, steps=15, folder=str(tmp_path), resume=True)
    assert steps() == 2 * all_steps
    assert torch.equal(flat(resumed), flat(straight))


@pytest.mark.parametrize("name", ["foof", "adamw", "muon"])
def test_accelerate_resumed_equals_uninterrupted(name, tmp_path, steps):
    straight = huggingface_gpt2.with_accelerate(name, steps=10)
    all_steps = steps()
    huggingface_gpt2.with_accelerate(name, steps=5, folder=str(tmp_path))
    resumed = huggingface_gpt2.with_accelerate(name, steps=10, folder=str(tmp_path), resume=True, start=5)
    assert steps() == 2 * all_steps
    assert torch.equal(flat(resumed), flat(straight))


@pytest.mark.parametrize("make", [
    lambda m: foof.KFAC(m, lr=0.02, damping=0.1, momentum=0.9, T=3), lambda m: foof.NaturalGradient(m, lr=0.05, damping=0.1),
    lambda m: foof.EKFAC(m, lr=0.02, damping=0.1, momentum=0.9, T=3), lambda m: foof.AdamW(m, lr=0.01, T=3),
], ids=["KFAC", "NaturalGradient", "EKFAC", "AdamW"])  # fmt: skip
def test_accelerate_with_curvature_of_its_own(make, tmp_path):
    g = torch.Generator().manual_seed(0)
    batches = [(torch.randn(8, 6, generator=g), torch.randint(0, 3, (8,), generator=g)) for _ in range(10)]

    def fit(start, stop, resume=False):
        accelerator = Accelerator(cpu=True)
        torch.manual_seed(0)
        plain = mlp(6, 10, 3)
        model, opt = accelerator.prepare(plain, make(plain))
        if resume:
            accelerator.load_state(tmp_path)
        for x, y in batches[start:stop]:
            opt.zero_grad()
            out = model(x)
            opt.optimizer.update_curvature(out)  # Accelerate's wrapper has the optimizer inside
            accelerator.backward(torch.nn.functional.cross_entropy(out, y))
            opt.step()
        accelerator.save_state(tmp_path)
        return flat(accelerator.unwrap_model(model))

    straight = fit(0, 10)
    fit(0, 5)
    assert torch.equal(fit(5, 10, resume=True), straight)
