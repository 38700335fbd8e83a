"""Who gets which training when: groups of ranks, their outcomes, and the end of the job."""

import dataclasses

import pytest

from spark_dl.launch.failures.errors import RankError
from spark_dl.trials.hand_out import HandOut
from spark_dl.trials.rank import Order
from tests.builders.settings import make_config


@dataclasses.dataclass
class Numbered:
    """Trainings 0 to `count` - 1, and what came of them."""

    count: int
    ended: list = dataclasses.field(default_factory=list)
    given: int = 0

    def next(self):
        if self.given == self.count:
            return None
        self.given += 1
        return Order(self.given - 1, make_config(), {}, f"/runs/{self.given - 1}", 1)

    def ends(self, order, entry):
        return entry["epoch"] >= order.trial

    def finish(self, order, result, error):
        self.ended.append((order.trial, result, error))


def ask(rank, **more):
    """A question of a rank; a task has another number than its rank."""
    return {"what": "next", "rank": rank, "task": rank + 10, **more}


def failed(error, *, is_secondary=False):
    return {"failed": {"error": error, "traceback": "", "is_secondary": is_secondary, "rank": 1, "host": "h", "pid": 7}}


def trial_of(answers):
    return {task: answer if isinstance(answer, str) else answer["trial"] for task, answer in answers.items()}


def test_a_group_gets_its_training_when_all_its_ranks_ask_and_groups_do_not_wait_for_each_other():
    trials = Numbered(3)
    hand_out = HandOut(trials, num_ranks=2)
    assert hand_out.answer(ask(0)) == {}
    assert hand_out.answer(ask(3)) == {}
    assert trial_of(hand_out.answer(ask(2))) == {12: 0, 13: 0}
    assert trial_of(hand_out.answer(ask(1))) == {10: 1, 11: 1}
    assert hand_out.answer(ask(3)) == {}
    assert trial_of(hand_out.answer(ask(2, result={"loss": 1}))) == {12: 2, 13: 2}
    assert trials.ended == [(0, {"loss": 1}, None)]


def test_a_group_without_work_waits_until_all_are_done_and_all_end_together():
    trials = Numbered(2)
    hand_out = HandOut(trials, num_ranks=1)
    assert [trial_of(hand_out.answer(ask(rank))) for rank in range(3)] == [{10: 0}, {11: 1}, {12: "wait"}]
    assert hand_out.answer(ask(2)) == {12: "wait"}
    assert hand_out.answer(ask(0, result={})) == {10: "wait"}
    assert hand_out.answer(ask(1, result={})) == {11: "end"}
    assert [hand_out.answer(ask(rank)) for rank in (0, 2)] == [{10: "end"}, {12: "end"}]
    assert trials.ended == [(0, {}, None), (1, {}, None)]


def test_an_order_is_json_and_its_name_is_unique():
    (order,) = HandOut(Numbered(1), num_ranks=1).answer(ask(0)).values()
    assert (order["name"], order["run_dir"], order["generation"]) == ("trial 0", "/runs/0", 1)
    assert order["config"] == make_config().to_dict()
    fold = Order(3, make_config(), {"hidden": 4}, "/runs", 2, fold=1)
    assert fold.name == "trial 3, fold 1"


def test_the_error_of_a_training_is_that_of_the_rank_that_failed_first():
    trials = Numbered(2)
    hand_out = HandOut(trials, num_ranks=3)
    for rank in range(3):
        hand_out.answer(ask(rank))
    hand_out.answer(ask(0, **failed("RuntimeError: Connection closed by peer", is_secondary=True)))
    hand_out.answer(ask(2, **failed("ZeroDivisionError: no loss")))
    answers = hand_out.answer(ask(1, **failed("RuntimeError: Connection closed by peer", is_secondary=True)))
    assert trial_of(answers) == {10: 1, 11: 1, 12: 1}
    ((trial, result, error),) = trials.ended
    assert (trial, result) == (0, None)
    assert isinstance(error, RankError)
    assert "rank 1 on h (pid 7) failed: ZeroDivisionError: no loss" in str(error)


@pytest.mark.parametrize(("epoch", "ends"), [(0, False), (1, True)])
def test_a_question_about_an_epoch_is_about_the_training_of_its_group(epoch, ends):
    hand_out = HandOut(Numbered(2), num_ranks=1)
    hand_out.answer(ask(0))
    hand_out.answer(ask(1))  # trial 1
    assert hand_out.answer(ask(1, what="epoch", entry={"epoch": epoch})) == {11: ends}
