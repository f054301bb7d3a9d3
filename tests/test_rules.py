"""The update rules against the same written out densely, in float64; and the limits in which they are something well known."""

import math

import pytest
import torch

from foof.kronecker import in_blocks
from foof.optim import rules

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def randn(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def semidefinite(m, batch=(), rank=None, seed=1):
    root = randn(*batch, m, rank or m + 2, seed=seed)
    return root @ root.mT


def close(a, b, tolerance=1e-10):
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance)


def orthogonalised(M, steps=5):
    """The polynomial on the singular values, one by one."""
    U, s, Vh = torch.linalg.svd(M, full_matrices=False)
    s = s / s.norm()
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return U @ torch.diag(s) @ Vh


def dense_inverse(Sigma, ridge, power):
    """Of Σ and a ridge relative to its mean eigenvalue, times that eigenvalue."""
    mean = torch.linalg.eigvalsh(Sigma).mean()
    s, U = torch.linalg.eigh(Sigma + ridge * mean * torch.eye(len(Sigma), dtype=Sigma.dtype))
    return U @ torch.diag((s / mean) ** power) @ U.T


# --- Descent and inverses --------------------------------------------------------------------------------------------------------


def test_descend_is_sgd_with_momentum_and_decoupled_decay():
    w, v = randn(3, 4), torch.zeros(3, 4, dtype=torch.float64)
    by_hand, velocity = w.clone(), v.clone()
    for t in range(3):
        g = randn(3, 4, seed=10 + t)
        rules.descend([w], [g], [v], lr=0.1, momentum=0.9, weight_decay=0.5)
        velocity = 0.9 * velocity + g
        by_hand = (1 - 0.1 * 0.5) * by_hand - 0.1 * velocity
    assert close(w, by_hand)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("lies", ["alike", "weight transposed", "gradient transposed", "a slice"])
def test_descend_reads_tensors_by_their_strides(lies, dtype):
    """One pass over memory is for tensors that lie there alike: whatever their strides, the step is the one written out."""
    w, g, v = (randn(4, 4, seed=s).to(dtype) for s in range(3))
    w = w.mT if lies == "weight transposed" else w[:, :3] if lies == "a slice" else w
    g = g.mT if lies == "gradient transposed" else g[:, :3] if lies == "a slice" else g
    v = v[:, :3] if lies == "a slice" else v
    velocity = v * 0.9 + g
    expected = torch.add(w, velocity, alpha=-0.1)
    rules.descend([w], [g], [v], lr=0.1, momentum=0.9, weight_decay=0.0)
    assert v.equal(velocity)  # bit for bit
    assert w.equal(expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_descend_rounds_the_same_for_any_number_of_entries(dtype):
    """Bit for bit, whether or not they fill vectors of the processor."""
    sizes = [*range(70), 4099]
    w, g, v = ([randn(n, seed=s * 5000 + n).to(dtype) for n in sizes] for s in range(3))
    velocities = [torch.add(old * 0.9, new) for old, new in zip(v, g, strict=True)]
    expected = [torch.add(each, velocity, alpha=-0.3) for each, velocity in zip(w, velocities, strict=True)]
    rules.descend(w, g, v, lr=0.3, momentum=0.9, weight_decay=0.0)
    assert all(map(torch.equal, v, velocities))
    assert all(map(torch.equal, w, expected))


@pytest.mark.parametrize("n", [16, 17])
@pytest.mark.parametrize("factors", [[], [torch.tensor(0.5)]])
def test_autograd_notices_a_step(factors, n):
    w, g, v = randn(n).requires_grad_(), randn(n, seed=1), randn(n, seed=2)
    loss, version = w.square().sum(), v._version
    with torch.no_grad():
        if factors:
            rules.descend_by([w], [g], [v], factors, lr=0.1, momentum=0.9, weight_decay=0.0)
        else:
            rules.descend([w], [g], [v], lr=0.1, momentum=0.9, weight_decay=0.0)
    assert v._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("factor", [1e-30, 1e-18, 1e-10, 1e-3, 0.7, 1.0, 1e8, 1e30])
def test_descend_by_factors_of_any_size(factor, dtype):
    w, g, v, f = torch.zeros(16, dtype=dtype), randn(16).to(dtype), torch.zeros(16, dtype=dtype), torch.tensor(factor, dtype=dtype)
    rules.descend_by([w], [g], [v], [f], lr=0.5, momentum=0.9, weight_decay=0.0)
    assert torch.allclose(v, f * g, rtol=1e-6 if dtype == torch.float32 else 1e-14, atol=0.0)
    assert torch.equal(w, -0.5 * v)


@pytest.mark.parametrize("power", [-1.0, -0.5])
@pytest.mark.parametrize("rank", [2, 8])
def test_relative_inverse(power, rank):
    Sigma = semidefinite(6, (3,), rank)
    ours = rules.relative_inverse(Sigma, 0.1, power)
    assert close(ours, torch.stack([dense_inverse(S, 0.1, power) for S in Sigma]), 1e-9)
    assert close(rules.relative_inverse(100 * Sigma, 0.1, power), ours)
    nothing_seen = rules.relative_inverse(torch.zeros(3, 3, dtype=torch.float64), 0.1, power)
    assert close(nothing_seen, 0.1**power * torch.eye(3, dtype=torch.float64))


def test_relative_inverse_refuses_other_powers():
    with pytest.raises(ValueError, match=r"power must be one of \(-1.0, -0.5\), got -0.25"):
        rules.relative_inverse(semidefinite(3), 0.1, -0.25)


# --- Muon ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "m"), [(3, 5), (5, 3), (4, 4), (1, 4)])
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_newton_schulz_is_its_polynomial_on_singular_values(n, m, steps):
    M = randn(n, m)
    assert close(rules.newton_schulz(M, steps), orthogonalised(M, steps))


@pytest.mark.parametrize("batch", [(3,), (2, 3)])
def test_newton_schulz_of_a_batch_is_each_by_itself(batch):
    M = randn(*batch, 5, 3)
    each = torch.stack([orthogonalised(x) for x in M.flatten(end_dim=-3)]).reshape(M.shape)
    assert close(rules.newton_schulz(M), each)


def test_newton_schulz_forgets_scale_keeps_dtype_and_its_argument():
    M = randn(4, 6)
    before = M.clone()
    assert close(rules.newton_schulz(1e4 * M), rules.newton_schulz(M))
    assert torch.equal(M, before)
    for dtype in (torch.bfloat16, torch.float32):
        narrow = rules.newton_schulz(M.to(dtype))
        assert narrow.dtype == dtype
        assert close(narrow.double(), rules.newton_schulz(M.to(dtype).double()), 2 * torch.finfo(dtype).eps + 1e-5)
    assert not rules.newton_schulz(torch.zeros(3, 4)).any()


def test_muon_scale():
    assert rules.muon_scale(8, 2) == 2.0
    assert rules.muon_scale(2, 8) == 1.0
    assert rules.muon_scale(25, 9, "match_rms_adamw") == rules.muon_scale(9, 25, "match_rms_adamw") == 1.0
    with pytest.raises(ValueError, match="scale must be one of"):
        rules.muon_scale(2, 8, "other")


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("power", [-1.0, -0.5])
@pytest.mark.parametrize(("n", "m"), [(6, 3), (3, 6)])
def test_muon_on_neurons_written_out(n, m, power, nesterov):
    """Four steps with a new Σ at each: momentum holds raw gradients, the newest inverse is applied to all of it."""
    buffer, gradients = torch.zeros(n, m, dtype=torch.float64), []
    for t in range(4):
        gradients.append(randn(n, m, seed=20 + t))
        Sigma = semidefinite(m, seed=30 + t)
        ours = rules.muon_update(buffer, gradients[-1], rules.relative_inverse(Sigma, 0.1, power), 0.9, nesterov)
        B = sum(0.1 * 0.9 ** (t - i) * g for i, g in enumerate(gradients))
        M = 0.9 * B + 0.1 * gradients[-1] if nesterov else B
        expected = math.sqrt(max(1, n / m)) * orthogonalised(M @ dense_inverse(Sigma, 0.1, power))
        assert close(ours, expected)
        assert close(buffer, B)


@pytest.mark.parametrize("scale", rules.MUON_SCALES)
def test_without_neurons_it_is_torchs_muon(scale, monkeypatch):
    """torch's own runs Newton-Schulz in bfloat16; in float64 the two agree to rounding."""
    from torch.optim import _muon

    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", lambda G, c, steps, eps: orthogonalised(G, steps))
    theirs = torch.nn.Parameter(randn(4, 6))
    ours, buffer = theirs.detach().clone(), torch.zeros(4, 6, dtype=torch.float64)
    opt = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn=scale)
    for t in range(3):
        theirs.grad = randn(4, 6, seed=t)
        rules.descend([ours], [rules.muon_update(buffer, theirs.grad, scale=scale)], [], 0.02, 0.0, 0.1)
        opt.step()
    # torch decays with the lr before the scale, as we do
    assert close(ours, theirs.detach())


def test_a_large_ridge_is_muon_and_scaled_inputs_change_nothing():
    g, Sigma = 1e9 * randn(4, 6), semidefinite(6)
    plain = rules.muon_update(torch.zeros_like(g), g)
    assert close(rules.muon_update(torch.zeros_like(g), g, rules.relative_inverse(Sigma, 1e9)), plain, 1e-7)
    ours, scaled = (rules.muon_update(torch.zeros_like(g), g, rules.relative_inverse(c * Sigma, 0.1)) for c in (1.0, 1e4))
    assert close(ours, scaled)
    assert not close(ours, plain, 1e-2)


# --- Adam in the eigenbasis ------------------------------------------------------------------------------------------------------


def test_in_the_identity_basis_it_is_adamw():
    theirs = torch.nn.Parameter(randn(4, 6))
    ours = theirs.detach().clone()
    first, second = torch.zeros_like(ours), torch.zeros_like(ours)
    opt = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.95), weight_decay=0.3)
    identity = torch.eye(6, dtype=torch.float64)
    for t in range(1, 5):
        theirs.grad = randn(4, 6, seed=t)
        update = rules.adam_in_basis(first, second, theirs.grad, None if t % 2 else identity, t)
        rules.descend([ours], [update], [], 0.01, 0.0, 0.3)
        opt.step()
    assert close(ours, theirs.detach())


def test_adam_in_changing_bases_written_out():
    """The first moment as an average of raw gradients, rotated at the end; the second entry by entry when the basis changes."""
    n, m, (b1, b2) = 3, 5, (0.8, 0.9)
    first, second = torch.zeros(n, m, dtype=torch.float64), torch.zeros(n, m, dtype=torch.float64)
    raw, V, old = torch.zeros_like(first), torch.zeros_like(first), None
    for t in range(1, 7):
        g = randn(n, m, seed=40 + t)
        if t in (1, 2, 5):
            U = torch.linalg.eigh(semidefinite(m, seed=t))[1]
            rules.carry_moments(first, second, old, U)
            R = U if old is None else old.T @ U
            V = torch.tensor([[sum(V[i, k] * R[k, j] ** 2 for k in range(m)) for j in range(m)] for i in range(n)])
            old = U
        ours = rules.adam_in_basis(first, second, g, U, t, (b1, b2), 1e-8)
        raw = b1 * raw + (1 - b1) * g
        V = b2 * V + (1 - b2) * (g @ U) ** 2
        expected = ((raw @ U) / (1 - b1**t)) / (torch.sqrt(V / (1 - b2**t)) + 1e-8) @ U.T
        assert close(ours, expected)


def test_moments_follow_signs_and_order_of_eigenvectors():
    """eigh may flip and reorder: a basis that is the same up to that gives the same updates."""
    U = torch.linalg.eigh(semidefinite(5))[1]
    same = U[:, [3, 0, 4, 1, 2]] * torch.tensor([1.0, -1, 1, -1, -1], dtype=torch.float64)
    moments = [(torch.zeros(3, 5, dtype=torch.float64), torch.zeros(3, 5, dtype=torch.float64)) for _ in range(2)]
    for t in range(1, 6):
        g = randn(3, 5, seed=t)
        if t == 3:
            rules.carry_moments(*moments[1], U, same)
        bases = (U, same if t >= 3 else U)
        a, b = (rules.adam_in_basis(*pair, g, basis, t) for pair, basis in zip(moments, bases, strict=True))
        assert close(a, b)


def test_carried_second_moments_are_exact_for_uncorrelated_gradients():
    V, old, new = randn(2, 5) ** 2, *(torch.linalg.eigh(semidefinite(5, seed=s))[1] for s in (1, 2))
    covariance = [old @ torch.diag(v) @ old.T for v in V]  # of one row's gradients in the original coordinates
    expected = torch.stack([torch.diagonal(new.T @ C @ new) for C in covariance])
    carried = V.clone()
    rules.carry_moments(torch.zeros_like(V), carried, old, new)
    assert close(carried, expected)
    assert close(carried.sum(-1), V.sum(-1))


# --- How far outputs move --------------------------------------------------------------------------------------------------------


def moved(update, weight, a):
    """ρ from outputs on data: rows a ``(R, m)``."""
    return ((a @ update.T).square().sum() / (a @ weight.T).square().sum()).sqrt()


def test_output_change_is_that_of_the_outputs():
    a, W, U = randn(20, 5), randn(3, 5, seed=1), randn(3, 5, seed=2)
    assert close(rules.output_change(U, a.T @ a / 20, W), moved(U, W, a))
    batch = torch.stack([a, 3 * a]), torch.stack([W, W]), torch.stack([U, 2 * U])
    each = rules.output_change(batch[2], batch[0].mT @ batch[0], batch[1])
    assert close(each, torch.stack([moved(U, W, a), moved(2 * U, W, a)]))


@pytest.mark.parametrize("c", [1e-2, 1e2])
def test_output_change_forgets_the_scale_of_inputs(c):
    """And inputs times c with weights over c are the same network, so is an update over c; as long as no weights count as nearly zero."""
    Sigma, W, U = semidefinite(5), randn(3, 5, seed=1), randn(3, 5, seed=2)
    assert close(rules.output_change(U, c**2 * Sigma, W), rules.output_change(U, Sigma, W))
    W, U = W * max(c, 1), U * max(c, 1)
    assert close(rules.output_change(U / c, c**2 * Sigma, W / c), rules.output_change(U, Sigma, W))


@pytest.mark.parametrize(("tau", "factor"), [(1e6, 1.0), (0.01, None)])
def test_bounded(tau, factor):
    Sigma, W, U = semidefinite(5, (2,)), randn(2, 3, 5, seed=1), randn(2, 3, 5, seed=2)
    rho = rules.output_change(U, Sigma, W)
    ours = U * rules.at_most(tau, rho)[:, None, None]
    assert close(ours, U * (factor or tau / rho)[:, None, None] if factor is None else U)
    assert close(rules.output_change(ours, Sigma, W), rho.clamp_max(tau))


def test_a_layer_of_zeros_can_leave_zero():
    """LoRA's B: measured against a part of the outputs of weights of variance 1/m, and no further than τ of that."""
    Sigma, U, W = semidefinite(5), randn(3, 5), torch.zeros(3, 5, dtype=torch.float64)
    rho, least = rules.output_change(U, Sigma, W), rules.FLOOR * 3 * torch.trace(Sigma) / 5
    assert close(rho, (torch.trace(U @ Sigma @ U.T) / least).sqrt())
    assert close(rules.output_change(U, Sigma, W + 1e-9), rho)  # one that has just left it is no smaller
    step = U * rules.at_most(0.1, rho)
    assert close(torch.trace(step @ Sigma @ step.T) / least, torch.tensor(0.01, dtype=torch.float64))
    assert rules.output_change(U, torch.zeros_like(Sigma), W) == 0


def test_the_power_of_one_hot_inputs():
    counts, U = randn(5) ** 2, randn(3, 5, seed=1)
    assert close(rules.output_power(U, counts), rules.output_power(U, torch.diag(counts)))
    assert close(rules.unit_power(counts, 3), rules.unit_power(torch.diag(counts), 3))


@pytest.mark.parametrize("groups", [(), (2,)])
def test_reach_times_norm_is_the_change(groups):
    """Of all groups together; of a layer with many neurons from some of them, exactly where all are alike."""
    Sigma, W, U = semidefinite(5, groups), randn(*groups, 3, 5, seed=1), randn(*groups, 3, 5, seed=2)
    rho = (rules.output_power(U, Sigma).sum() / rules.output_power(W, Sigma).sum()).sqrt()
    assert close(rules.reach(U, Sigma, W) * U.norm(), rho)
    many = [M.repeat_interleave(99, -2) for M in (U, W)]  # 297 neurons, every third is looked at
    assert close(rules.reach(many[0], Sigma, many[1]) * many[0].norm(), rho)


def test_reach_by_blocks_of_inputs():
    """Is that of the whole with Σ block-diagonal, also where the weights count as nearly zero, and where nothing moves."""
    Sigma = semidefinite(4, (2,))
    Sigma[1, -1], Sigma[1, :, -1] = 0, 0  # seven inputs: the last block is filled up
    whole = torch.block_diag(*Sigma)[:7, :7]
    none, some, other = torch.zeros(3, 7, dtype=torch.float64), randn(3, 7, seed=1), randn(3, 7, seed=2)
    for U, W in ((some, other), (some, none), (none, other)):
        parts = [in_blocks(M, 2) for M in (U, W)]
        assert close(rules.reach(parts[0], Sigma, parts[1], inputs=7), rules.reach(U, whole, W))


def test_reach_of_no_update_is_that_of_one_alike_in_all_directions():
    Sigma, W = semidefinite(5), randn(3, 5)
    alike = torch.eye(5, dtype=torch.float64)
    power = rules.output_power(alike, Sigma) / alike.square().sum()
    assert close(rules.reach(torch.zeros(3, 5, dtype=torch.float64), Sigma, W), (power / rules.output_power(W, Sigma)).sqrt())


def test_paced():
    rho = torch.tensor([4.0, 1.0, 0.1, 0.0, math.nan])
    usual, factor = torch.tensor([4.0, 1.9, 2.0, 0.0, 1.0]), torch.tensor([0.25, 1.0, 1.0, 0.0, math.nan])
    assert torch.allclose(rules.paced(rho, usual), factor, equal_nan=True)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_descend_by_is_descend_on_scaled_gradients(momentum):
    p, g, v = randn(3, 4), randn(3, 4, seed=1), randn(3, 4, seed=2)
    ours, theirs, factor = [p.clone(), v.clone()], [p.clone(), v.clone()], torch.tensor(0.3, dtype=torch.float64)
    rules.descend_by([ours[0]], [g], [ours[1]], [factor], 0.1, momentum, 0.5)
    rules.descend([theirs[0]], [0.3 * g], [theirs[1]], 0.1, momentum, 0.5)
    assert close(ours[0], theirs[0])
    assert close(ours[1], theirs[1])


def test_nan_stays_nan():
    Sigma, W, U = semidefinite(5), randn(3, 5, seed=1), randn(3, 5, seed=2)
    for which in range(3):
        arguments = [U.clone(), Sigma.clone(), W.clone()]
        arguments[which][0, 0] = math.nan
        rho = rules.output_change(*arguments)
        assert rho.isnan()
        assert rules.at_most(0.1, rho).isnan()
