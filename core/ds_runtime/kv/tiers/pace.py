"""Whether bringing a page beats computing it: measured at the start, on rank 0."""

from __future__ import annotations

from dataclasses import dataclass, replace

PROBED = 16 << 20  # bytes of the disk that are read to learn its speed


@dataclass(frozen=True, slots=True)
class BringPace:
    """Seconds per page. computed: in a chunk of a prompt without a past; loaded: from host memory;
    read: from the disk to there, 0 without one."""

    computed: float
    loaded: float
    read: float = 0.0

    @property
    def host_pays(self) -> bool:
        """Whether what host memory has is loaded."""
        return self.loaded < self.computed

    @property
    def disk_pays(self) -> bool:
        """Whether what the disk has is read."""
        return self.loaded + self.read < self.computed

    def with_disk(self, read: float) -> BringPace:
        """A copy with these seconds per page from the disk."""
        return replace(self, read=read)

    @property
    def said(self) -> list[str]:
        """What the start tells."""
        lines = [self._line("host", self.loaded, self.host_pays)]
        if self.read:
            lines.append(self._line("disk", self.loaded + self.read, self.disk_pays))
        return lines

    def _line(self, tier: str, seconds: float, pays: bool) -> str:
        why = "pages are brought from there" if pays else "nothing is brought from there"
        return (
            f"{tier}: {1e6 * seconds:.0f} µs a page, {1e6 * self.computed:.0f} µs to compute it: "
            f"{why}"
        )
