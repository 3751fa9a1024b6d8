from __future__ import annotations

import torch


def run_starts(
    x_BGSD: torch.Tensor, threshold: float, chunk: int, metric: str, *, centred: bool = False
) -> list[list[int]]:
    """Return the first rows of runs of each (batch, head), by a loop over rows in float64. centred: Compare
    rows minus their chunk's mean."""
    starts = []
    for head_SD in x_BGSD.double().flatten(0, 1):
        parts = [part - part.mean(0) * centred for part in head_SD.split(chunk)]
        rows = torch.cat(parts).tolist()
        found: list[int] = []
        for place, row in enumerate(rows):
            near = False
            if place % chunk:
                a, b = torch.tensor(rows[found[-1]]), torch.tensor(row)
                if metric == "euclidean":
                    near = float((a - b).norm()) <= threshold
                else:
                    lengths = float(a.norm() * b.norm())
                    near = (float(a @ b) / lengths if lengths else 0.0) >= threshold
            if not near:
                found.append(place)
        starts.append(found)
    return starts
