"""Episodes: windows of utterances, grouped by what they are about."""

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from kvpolicy import KVPolicyError

Vectors = NDArray[np.float64]

_RESTARTS = 10  # of k-means, as in the authors' code


@attrs.frozen(eq=False)
class Episode:
    """Windows that are about the same.

    Attributes:
        windows: Their numbers, rising.
        medoids: Those nearest to the centroid, nearest first.
        centroid: Mean of their embeddings, ``[D]``.
    """

    windows: tuple[int, ...]
    medoids: tuple[int, ...]
    centroid: Vectors


def windows_of(utterances: Sequence[str], size: int, joint: str = "") -> list[str]:
    """The texts of windows of so many utterances each, one behind the other; the last may be short.

    Args:
        utterances: What was said, in order.
        size: Utterances of a window.
        joint: Text behind each utterance.
    """
    starts = range(0, len(utterances), size)
    return ["".join(one + joint for one in utterances[start : start + size]) for start in starts]


def normalised(vectors: Vectors) -> Vectors:
    """Vectors ``[..., D]`` of length 1; those of length 0 stay."""
    norms = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.where(norms > 0, norms, 1)


def group(embeddings: Vectors, num_episodes: int, *, n_medoid: int, seed: int = 0) -> list[Episode]:
    """Group windows by their embeddings with k-means, the best of several starts.

    Args:
        embeddings: Of each window, ``[N, D]``, of length 1.
        num_episodes: Groups; there are fewer if fewer windows differ.
        n_medoid: Windows of each that are its medoids, at most.
        seed: Random seed of the starts.

    Returns:
        The episodes, in the order of their first windows.
    """
    num = min(num_episodes, len(np.unique(embeddings, axis=0)))
    labels = _k_means(embeddings, num, np.random.default_rng(seed))
    episodes = []
    for label in dict.fromkeys(labels.tolist()):
        (members,) = np.nonzero(labels == label)
        centroid = embeddings[members].mean(axis=0)
        nearness = embeddings[members] @ normalised(centroid)
        # Of equally near ones, the first.
        order = members[np.argsort(-nearness, kind="stable")]
        episodes.append(Episode(_ints(members), _ints(order[:n_medoid]), centroid))
    return episodes


def nearest(question: Vectors, episodes: Sequence[Episode], *, by: str = "cosine") -> int:
    """The number of the episode that a question is about.

    Args:
        question: Its embedding, ``[D]``, of length 1.
        episodes: The episodes.
        by: ``"cosine"`` to the centroid, or ``"dot"``, the product with the centroid, which favours
            episodes whose windows are alike.
    """
    centroids = np.stack([episode.centroid for episode in episodes])
    return int(np.argmax((normalised(centroids) if by == "cosine" else centroids) @ question))


def _ints(numbers: NDArray[np.int64]) -> tuple[int, ...]:
    return tuple(numbers.tolist())


def _k_means(vectors: Vectors, num: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Labels of the start with the least sum of squared distances, ``[N]``."""
    if num == 1:
        return np.zeros(len(vectors), dtype=np.int64)
    from scipy.cluster.vq import ClusterError, kmeans2

    best: tuple[float, NDArray[np.int64]] | None = None
    for _ in range(_RESTARTS):
        try:
            centres, labels = kmeans2(vectors, num, iter=100, minit="++", missing="raise", rng=rng)
        except ClusterError:  # a start that leaves a group empty
            continue
        loss = float(((vectors - centres[labels]) ** 2).sum())
        if best is None or loss < best[0]:
            best = loss, labels.astype(np.int64)
    if best is None:
        msg = (
            f"the windows cannot be divided into {num} episodes, all {_RESTARTS} starts leave one "
            "empty; ask for fewer"
        )
        raise KVPolicyError(msg)
    return best[1]
