"""What TorchRL does to an env that it wraps, and must not do to one of ours."""

from __future__ import annotations

from typing import NoReturn

from swath.errors import UnsupportedEnvError


class NotOfTorchRL:
    """An env without specs, which TorchRL's wrappers can only fail with: it says so to the first of them."""

    @property
    def _inplace_update(self) -> bool:
        return False

    @_inplace_update.setter
    def _inplace_update(self, value: bool) -> NoReturn:
        """TransformedEnv sets this in its constructor; all else that it asks for it asks for much later."""
        raise UnsupportedEnvError(
            f"TorchRL's TransformedEnv wraps envs of TorchRL, not {self!r}. Wrap TorchRL's own env, which swath takes "
            "as it is, as in Collector(TransformedEnv(torchrl.envs.GymEnv('CartPole-v1'), transform), policy, ...), or "
            "wrap the env inside this one with gymnasium.wrappers."
        )
