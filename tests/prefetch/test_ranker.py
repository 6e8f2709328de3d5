"""The ranker: both ways of scoring agree, it ranks what a client predicts, and a hostile file costs a warning."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mcp_client.errors import ProtocolError
from mcp_client.prefetch import features
from mcp_client.prefetch.predictor import Predictor
from mcp_client.prefetch.profile import Profile
from mcp_client.prefetch.ranker import Ranker
from mcp_profile.training import NotEnoughError, Step, Trained, train


def sessions(count: int, seed: int = 1) -> list[list[Step]]:
    """Sessions of five pages; every third ends early, so that candidates come true or not."""
    draw = random.Random(seed)
    made = []
    for number in range(count):
        at, t, session = draw.randrange(40), 1e9 + 100 * number, []
        for _ in range(draw.randrange(2, 6)):
            session.append((t, f"/p/{at}", ""))
            at, t = (at + draw.choice((1, 1, 1, 7, 11))) % 40, t + 1
        made.append(session)
    return made


@pytest.fixture(scope="module")
def trained() -> Trained:
    return train(sessions(900))


def test_onnx_runtime_and_numpy_give_the_same_numbers(trained: Trained) -> None:
    pytest.importorskip("onnxruntime")
    rows = np.concatenate([trained.rows, trained.rows[:50] * np.float32(-3.0)])
    fast, plain = Ranker(trained.onnx), Ranker(trained.onnx, runtime=False)
    assert fast._session is not None
    np.testing.assert_allclose(fast.score(rows), plain.score(rows), atol=1e-5)
    assert len(np.unique(plain.score(rows))) > 10


def test_it_knows_more_than_statistics_alone(trained: Trained) -> None:
    assert trained.metrics["ranker"]["log_loss"] < trained.metrics["statistics"]["log_loss"]
    assert sum(count for _, _, count in trained.metrics["ranker"]["reliability"]) == len(trained.labels)


def test_a_profile_s_ranker_decides_a_client_s_probabilities(trained: Trained) -> None:
    teacher = Predictor()
    for number, session in enumerate(sessions(300)):
        for t, path, _ in session:
            teacher.observe(str(number), path, t)
    profile = teacher.to_profile("1")
    with_ranker = Profile("1", profile.order, profile.paths, ranker=trained.onnx)
    client = Predictor()
    client.load(Profile.from_json(with_ranker.to_json()))
    client.observe("s", "/p/3", 0.0)
    found = {one.path: one for one in client.predict("s", 10)}
    rows = dict(client.candidates("s", 10))
    scores = Ranker(trained.onnx).score(features.table(list(rows.values())))
    for path, score in zip(rows, scores.tolist(), strict=True):
        if path in found:
            assert found[path].probability == pytest.approx(max(score, found[path].next_probability))
            assert found[path].reason.endswith("ranked")


def test_a_bad_ranker_costs_a_warning_and_no_prediction(caplog: pytest.LogCaptureFixture) -> None:
    client = Predictor()
    client.load(Profile("1", 5, {"": {"/b": 3.0}, "/a": {"/b": 3.0}}, ranker=b"no onnx"))
    client.observe("s", "/a", 0.0)
    assert [one.path for one in client.predict("s", 3)] == ["/b"]
    assert "ranked by statistics alone" in caplog.text


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_refused_or_scores_without_an_accident(
    data: st.DataObject, trained: Trained
) -> None:
    blob = bytearray(trained.onnx)
    for _ in range(data.draw(st.integers(1, 4))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    blob = blob[: data.draw(st.integers(len(blob) - 20, len(blob)))]
    try:
        ranker = Ranker(bytes(blob), runtime=False)
    except ProtocolError:
        return
    assert np.isfinite(ranker.score(trained.rows[:20])).all()


def test_too_few_sessions_are_told() -> None:
    with pytest.raises(NotEnoughError, match="collect more sessions"):
        train(sessions(10))
