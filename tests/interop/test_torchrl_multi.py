"""Our collectors with workers beside TorchRL's: the same envs and policy, the same batches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peer_batches import layout, make_env, make_policy
from tensordict import TensorDict, TensorDictBase

from swath import collectors
from swath.keys import TRAJ_IDS

pytest.importorskip("torchrl")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.torchrl]
SCRIPT = Path(__file__).with_name("peer_batches.py")


def assert_same(ours: TensorDictBase, theirs: TensorDictBase) -> None:
    """Entries, names and values; beside theirs, ours always says whether an episode was truncated."""
    assert layout(ours.exclude("truncated", ("next", "truncated"))) == layout(theirs)
    assert ours.names == theirs.names
    for key, value in theirs.items(True, True):
        if key != TRAJ_IDS:
            assert torch.equal(ours.get(key), value), key


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["MultiSyncCollector", "MultiAsyncCollector"])
def test_batches_are_the_peers(kind: str, tmp_path: Path) -> None:
    """Shapes, entries, names and values; the peer takes its time to start."""
    workers = 2 if kind == "MultiSyncCollector" else 1
    frames, saved = 21 * workers, tmp_path / "batches.pt"
    command = [sys.executable, "-W", "ignore", str(SCRIPT), kind, str(workers), str(frames), str(saved)]
    subprocess.run(command, check=True, timeout=100, cwd=tmp_path)
    with getattr(collectors, kind)(
        [make_env] * workers,
        make_policy(),
        frames_per_batch=frames,
        total_frames=2 * frames,
        track_policy_version=False,
    ) as collector:
        ours = list(collector)
    theirs = torch.load(saved)
    assert len(ours) == len(theirs) == 2
    for batch, (entries, shape, names) in zip(ours, theirs, strict=True):
        assert_same(batch, TensorDict(entries, batch_size=shape, names=names))
