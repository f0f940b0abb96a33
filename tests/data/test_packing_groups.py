"""Packing a prompt group tells of each trajectory whose it is and which part of its episode."""

import json

from areal_core.data import Episode, FinishReason, PackedBatch, Trajectory
from areal_core.data.batch import join_batches
from areal_core.data.packing import from_bytes, pack_group, to_bytes
from areal_core.data.trajectory import Generation


def episode(lengths):
    made = [Generation([5] * n, [-0.1] * n, [0] * n, FinishReason.STOP) for n in lengths]
    return Episode([Trajectory.from_generation([1], each) for each in made], 1.0)


def test_an_agent_whose_name_no_utf8_can_write_is_one():
    made = {0: episode([1]), 1: episode([1])}
    made[0].trajectories[0].agent_id = "\ud800"
    agent_id = pack_group(4, (0, 0), 2, made)["sequences.agent_id"].tolist()
    assert agent_id[0] != agent_id[1]


def test_parts_are_numbered_in_the_order_of_their_episode():
    batches = [
        pack_group(4, (0, 0), 3, {0: episode([3, 1, 2]), 2: episode([2])}),
        pack_group(7, (1, 0), 1, {0: episode([1, 4])}),
    ]
    batch = join_batches([PackedBatch.from_columns(columns) for columns in batches])
    assert batch["part_index"].tolist() == [0, 1, 2, 0, 0, 1]
    assert batch["sample_index"].tolist() == [0, 0, 0, 2, 0, 0]
    assert batch["episode_id"].tolist() == [12, 12, 12, 14, 7, 7]
    assert batch.lengths.tolist() == [4, 2, 3, 3, 2, 5]


def test_each_column_of_a_record_begins_where_its_numbers_may_lie():
    columns = pack_group(4, (0, 0), 1, {0: episode([2])})  # three tokens: an odd number of bytes in the mask
    data = to_bytes(columns)
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    assert (8 + size) % 8 == 0
    assert all(header[name]["data_offsets"][0] % values.itemsize == 0 for name, values in columns.items())
    assert all((found == columns[name]).all() for name, found in from_bytes(data).items())
