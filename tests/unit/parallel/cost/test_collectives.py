import pytest

from spark_dl.parallel.cost.cost import Network, all_gather_s, all_reduce_s, all_to_all_s, reduce_scatter_s, send_s

NETWORK = Network(alpha_s=0.5, bytes_per_s=10.0, gamma_s_per_byte=0.25)
COLLECTIVES = [all_reduce_s, all_gather_s, reduce_scatter_s, all_to_all_s]


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 16])
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(num_ranks):
    parts = reduce_scatter_s(num_ranks, 96, NETWORK) + all_gather_s(num_ranks, 96, NETWORK)
    assert all_reduce_s(num_ranks, 96, NETWORK) == pytest.approx(parts)


def test_seconds_are_messages_and_bytes_on_a_link():
    assert all_gather_s(4, 40, NETWORK) == pytest.approx(3 * 0.5 + 30 / 10)
    assert reduce_scatter_s(4, 40, NETWORK) == pytest.approx(3 * 0.5 + 30 / 10 + 30 * 0.25)
    assert all_to_all_s(4, 40, NETWORK) == all_gather_s(4, 40, NETWORK)
    assert send_s(40, NETWORK) == pytest.approx(0.5 + 4)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_one_rank_and_no_bytes_take_no_time(collective):
    assert collective(1, 40, NETWORK) == 0
    assert collective(4, 0, NETWORK) == 0
