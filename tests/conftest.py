"""One thread per worker, and hypothesis without chance or deadline: a failure is the same failure everywhere."""

import os

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[name] = "1"  # before torch is imported: xdist already fills the cores

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402
from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: E402

torch.set_num_threads(1)
settings.register_profile(
    "foof", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("foof")


@pytest.fixture
def steps():
    """Steps taken by all optimizers so far: so that a resumed run cannot have started over."""
    count = [0]
    handle = register_optimizer_step_post_hook(lambda *_: count.__setitem__(0, count[0] + 1))
    yield lambda: count[0]
    handle.remove()
