"""TorchRL with the fastest settings found that still deliver the agreed content.

Tried with `python -m benchmarks.peer_settings`: frames/s, each column the medians of one sitting on
two busy cores, so compare within a column.

| setting                                           | W1    | W2    | W3    | W6    |
|---------------------------------------------------|-------|-------|-------|-------|
| default: GymEnv, or SerialEnv of eight            | 1,226 | 2,553 | 2,557 | 2,256 |
| SerialEnv, `use_buffers=False`                    |       | 1,751 |       |       |
| ParallelEnv, eight workers                        |       | 1,078 |       |       |
| `GymEnv(num_envs=8)`: one process per env         |       | 2,407 |       |       |
| SyncVectorEnv wrapped, autoreset in the same step |       | 4,430 | 4,112 | 3,045 |
| SyncVectorEnv wrapped, autoreset disabled         |       | 5,836 | 4,869 | 3,370 |
| the same (W1: GymEnv), lean                       | 1,382 | 5,959 | 5,080 | 3,487 |
| lean, `use_buffers=False`                         | 1,361 | 6,137 | 4,905 | 3,466 |
| lean, `return_same_td=True`                       | 1,341 | 6,509 | 5,014 | 3,684 |
| lean, `compile_policy=True`                       | 1,857 | 7,472 | 9,564 | 3,687 |

"Lean" is `trust_policy=True` (the policy is not wrapped) and `track_traj_ids=False`. With the
policy compiled, buffers or one shared batch make no difference that stands out of the noise, nor
does `fullgraph`, so the simplest form is used. `device="cpu"` is slower than no device (992 on W1).
Out of the contest: `compact_obs` (no next observation in the batch) and a vector env that does not
copy (the collector keeps its buffer, and observations are overwritten before they are stored).

Where it wins: one wrapped vector env turns eight conversions and eight TensorDict steps into one,
and compiling removes most of the dispatch around the network, the distribution and the log-prob.
The latter needs a C++ compiler; without one this contestant fails and is reported so.
"""

from __future__ import annotations

from benchmarks.batch import Run
from benchmarks.contestants._peer import build_variant
from benchmarks.workloads import Workload


def build(workload: Workload) -> Run:
    one_env = workload.num_envs == 1
    return build_variant(workload, "lean, compiled" if one_env else "vector, lean, compiled")
