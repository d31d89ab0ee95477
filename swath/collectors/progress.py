"""A progress bar for iterating over a collector."""

from __future__ import annotations

from typing import Any

from tqdm.auto import tqdm


class Progress:
    """Shows frames out of `total_frames` and the recent episodes' return; exact at the end."""

    def __init__(self, collector: Any) -> None:
        self._collector = collector
        total = collector.config.total_frames
        done = collector.stats()["frames"]
        self._bar: Any = tqdm(total=total if total >= 0 else None, initial=done, unit="frame", unit_scale=True)

    def update(self) -> None:
        """Show where the collector is now."""
        stats = self._collector.stats()
        if "mean_return" in stats:
            means = f"return {stats['mean_return']:.1f}, length {stats['mean_length']:.0f}"
            self._bar.set_postfix_str(means, refresh=False)
        if self._bar.total is not None and stats["frames"] > self._bar.total:
            self._bar.total = stats["frames"]  # rounded up to whole steps of all lanes
        self._bar.update(stats["frames"] - self._bar.n)

    def passed(self, batch: Any) -> Any:
        """Show where the collector is now that it has delivered `batch`, which is handed on."""
        self.update()
        return batch

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        """Leave the bar standing at its last value."""
        if kind is None:
            self.update()
        self._bar.close()
