"""Functions of the user that get the events of a run."""

import time

from spark_dl.cli import progress


def test_B34_a_function_for_events_that_takes_long_is_named_once(monkeypatch, caplog):
    monkeypatch.setattr(progress, "_LONG_CALL_S", 0.1)
    seen = []

    def slow(event):
        seen.append(event)
        time.sleep(event["s"])

    for function in progress.as_functions([slow, seen.append]):
        for s in (0.0, 0.2, 0.2):
            function({"kind": "step", "s": s})
    assert [event["s"] for event in seen] == [0.0, 0.2, 0.2] * 2
    (warning,) = caplog.messages
    assert warning.startswith("on_event: a call of test_B34_")
    assert "slow took 0 s for an event 'step'; until it returns, the driver does not see" in warning
