"""Training of the ranker: boosted trees on what a client's predictor would have said, calibrated, as one ONNX operator.

Sessions are in the order in which they ended and cut by it, never by row: statistics are counted on the first 60 %; on the rest
a client that was given those statistics is played back, of which the trees learn from the first half, the calibration (Platt)
from the next quarter, and the last quarter is held out for the metrics. The label of a candidate that the session has not had
yet: it is asked for within the horizon (``predictor.HORIZON``) of the same visit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mcp_client.errors import ConfigurationError, MissingExtraError
from mcp_client.prefetch import features
from mcp_client.prefetch.predictor import HORIZON, Predictor
from mcp_client.prefetch.ranker import Ranker
from mcp_client.prefetch.routes import Route, RouteTable

from .sessions import IDLE_S

# (seconds, path, route template or "")
Step = tuple[float, str, str]
Metrics = dict[str, Any]

_COUNTED, _LEARNED, _CALIBRATED = 0.6, 0.8, 0.9
_CANDIDATES = 20
_MOST_ROWS = 150_000  # what trees learn from, as the trees in ../shared/data's figures did
_FEWEST_ROWS = 200  # in each part
# 40 trees of depth 5: 20 candidates took 64 µs with numpy and 18 with ONNX Runtime (medians, on a busy machine); the file 59 KB.
_TREES, _DEPTH = 40, 5
_TOLERANCE = 1e-5  # between the three that compute a score: float32 sums in other orders
_BINS = 10


class NotEnoughError(ValueError):
    """There are too few sessions to learn from."""


@dataclass(frozen=True, slots=True)
class Trained:
    """A ranker, its metrics, and the held-out candidates that they were measured on."""

    onnx: bytes
    metrics: Metrics
    rows: Any
    labels: Any


def train(sessions: Sequence[Sequence[Step]], *, order: int = 5, seed: int = 0) -> Trained:
    """Learn a ranker from sessions in the order of their ends. ``NotEnoughError`` says what is missing."""
    cuts = [int(share * len(sessions)) for share in (_COUNTED, _LEARNED, _CALIBRATED)]
    client = _client(sessions, cuts[0], order)
    ends = [*cuts[1:], len(sessions)]
    parts = [_play(client, sessions[start:end], start) for start, end in zip(cuts, ends, strict=True)]
    for name, (rows, labels) in zip(("training", "calibration", "held-out"), parts, strict=True):
        if len(rows) < _FEWEST_ROWS or len(np.unique(labels)) < 2:
            raise NotEnoughError(
                f"{len(rows)} candidates for {name} in {len(sessions)} sessions; expected {_FEWEST_ROWS} at least, some of "
                "which came true and some not: collect more sessions"
            )
    (rows, labels), calibration, (held, held_labels) = parts
    if len(rows) > _MOST_ROWS:
        kept = np.random.default_rng(seed).choice(len(rows), _MOST_ROWS, replace=False)
        rows, labels = rows[kept], labels[kept]
    onnx = _fit(rows, labels, *calibration, seed)
    metrics = {
        "sessions": len(sessions),
        "rows": {"training": len(rows), "calibration": len(calibration[0]), "held_out": len(held)},
        "ranker": evaluate(Ranker(onnx, runtime=False).score(held), held_labels),
        "statistics": evaluate(held[:, features.NAMES.index("soon")], held_labels),
    }
    return Trained(onnx, metrics, held, held_labels)


def evaluate(scores: Any, labels: Any) -> Metrics:
    """Log loss, average precision, and the reliability diagram: [mean score, share that came true, candidates] of each bin."""
    metrics = _sklearn("metrics")
    clipped = np.clip(np.asarray(scores, dtype=np.float64), 1e-6, 1 - 1e-6)
    bins = np.minimum((clipped * _BINS).astype(int), _BINS - 1)
    diagram = [
        [round(float(clipped[of].mean()), 4), round(float(labels[of].mean()), 4), int(of.sum())]
        for of in (bins == number for number in range(_BINS))
        if of.any()
    ]
    return {
        "log_loss": round(float(metrics.log_loss(labels, clipped, labels=[False, True])), 5),
        "average_precision": round(float(metrics.average_precision_score(labels, clipped)), 5),
        "reliability": diagram,
    }


def _client(sessions: Sequence[Sequence[Step]], counted: int, order: int) -> Predictor:
    """A client that has seen nothing itself and was given what the first sessions teach."""
    table = RouteTable()
    for template in dict.fromkeys(route for session in sessions for _, _, route in session if route):
        try:
            table.add(Route.of(template, _no_builder))
        except ConfigurationError:
            continue  # an event's route is what a client says it is
    teacher, client = Predictor(order, table), Predictor(order, table)
    for number, session in enumerate(sessions[:counted]):
        for t, path, _ in session:
            teacher.observe(str(number), path, t)
    client.load(teacher.to_profile("training"))
    return client


def _play(client: Predictor, sessions: Sequence[Sequence[Step]], start: int) -> tuple[Any, Any]:
    rows: list[list[float]] = []
    labels: list[bool] = []
    for number, session in enumerate(sessions, start):
        for visit in _visits(session):
            for at, (t, path, _) in enumerate(visit):
                client.observe(str(number), path, t)
                coming = {step[1] for step in visit[at + 1 : at + 1 + HORIZON]}
                for candidate, row in client.candidates(str(number), _CANDIDATES):
                    rows.append(row)
                    labels.append(candidate in coming)
    return features.table(rows), np.array(labels, dtype=bool)


def _visits(session: Sequence[Step]) -> list[list[Step]]:
    """Cut at long pauses; a reload of the same path is no step."""
    visits: list[list[Step]] = []
    last: Step | None = None
    for step in session:
        if last is None or step[0] - last[0] > IDLE_S:
            visits.append([step])
        elif step[1] != last[1]:
            visits[-1].append(step)
        last = step
    return visits


def _fit(rows: Any, labels: Any, calibration: Any, truths: Any, seed: int) -> bytes:
    model = _sklearn("ensemble").GradientBoostingClassifier(
        n_estimators=_TREES, max_depth=_DEPTH, min_samples_leaf=20, subsample=0.5, random_state=seed
    )
    model.fit(rows, labels)
    raw = model.decision_function(calibration).reshape(-1, 1)
    platt = _sklearn("linear_model").LogisticRegression(C=1e6).fit(raw, truths)
    slope, intercept = float(platt.coef_[0, 0]), float(platt.intercept_[0])
    onnx = _exported(model, slope, intercept)
    expected = 1 / (1 + np.exp(-(slope * raw[:, 0] + intercept)))
    for runtime in (True, False):  # what ONNX Runtime says, and what numpy says
        differs = float(np.abs(Ranker(onnx, runtime=runtime).score(calibration) - expected).max())
        if differs > _TOLERANCE:
            raise RuntimeError(
                f"the exported ranker differs from scikit-learn by {differs:.2g}; it was not kept"
            )
    return onnx


def _exported(model: Any, slope: float, intercept: float) -> bytes:
    """The trees as ONNX, with the calibration in their leaves: slope × Σ leaves + intercept is again a sum of leaves."""
    try:
        from skl2onnx import convert_sklearn
        from skl2onnx.common.data_types import FloatTensorType
    except ImportError as error:
        raise MissingExtraError("train", "skl2onnx", "training") from error
    proto = convert_sklearn(
        model,
        initial_types=[(features.INPUT, FloatTensorType([None, len(features.NAMES)]))],
        options={id(model): {"zipmap": False}},
        target_opset={"": 15, "ai.onnx.ml": 3},
    )
    trees = next(node for node in proto.graph.node if node.op_type == "TreeEnsembleClassifier")
    for attribute in list(trees.attribute):
        if attribute.name == "class_weights":
            scaled = [slope * weight for weight in attribute.floats]
            attribute.floats[:] = scaled
        elif attribute.name == "base_values":
            attribute.floats[:] = [slope * attribute.floats[0] + intercept]
        elif attribute.name in (
            "nodes_hitrates",
            "nodes_missing_value_tracks_true",
        ):  # defaults; a sixth of the file
            trees.attribute.remove(attribute)
    blob = proto.SerializeToString()
    assert isinstance(blob, bytes)
    return blob


def _sklearn(part: str) -> Any:
    import importlib

    try:
        return importlib.import_module(f"sklearn.{part}")
    except ImportError as error:
        raise MissingExtraError("train", "scikit-learn", "training") from error


def _no_builder() -> None:
    raise NotImplementedError("training reads routes; it builds no inputs")
