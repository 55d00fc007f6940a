"""Exchanges checkpoints between //checkpoint/dcp and Python's torch.distributed.checkpoint."""

import os
import pickle
import subprocess

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
import xml_unittest
from checkpoints import CheckpointTest, make_model, program, train, whole
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

PEER = program("tests/interop/dcp_peer")


def two_ranks(rank, folder, write_threads):
    """Saves a sharded model; later loads what C++ made of it, into tensors that are all zero."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store{write_threads}", rank=rank, world_size=2
    )
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    model = make_model()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {
        "model": model_state,
        "optimizer": optimizer_state,
        "columns": distribute_tensor(torch.arange(35.0).reshape(5, 7), mesh, [Shard(1)]),
        "epoch": 3,
    }
    theirs = os.path.join(folder, "theirs")
    dcp.save(state, storage_writer=FileSystemWriter(theirs, thread_count=write_threads))
    expected = whole(state)
    if rank == 0:
        torch.save(expected, os.path.join(folder, "expected.pt"))
        ours = os.path.join(folder, "ours")
        subprocess.run([PEER, "read", theirs, ours + ".pt"], check=True)
        subprocess.run([PEER, "write", ours + ".pt", ours], check=True)
    dist.barrier()

    other = make_model(seed=8)
    fully_shard(other, mesh=mesh)
    again = torch.optim.Adam(other.parameters(), lr=0.5)
    other_state, again_state = get_state_dict(other, again)
    back = {
        "model": other_state,
        "optimizer": again_state,
        "columns": distribute_tensor(torch.zeros(5, 7), mesh, [Shard(1)]),
        "epoch": 0,
    }
    dcp.load(back, checkpoint_id=os.path.join(folder, "ours"))
    set_state_dict(other, again, model_state_dict=back["model"],
                   optim_state_dict=back["optimizer"])  # fmt: skip
    train(model, optimizer, 1)
    train(other, again, 1)
    for a, b in zip(model.parameters(), other.parameters()):
        assert torch.equal(a.full_tensor(), b.full_tensor())
    assert back["epoch"] == 3
    assert torch.equal(back["columns"].full_tensor(), torch.arange(35.0).reshape(5, 7))
    dist.destroy_process_group()


class DcpInteropTest(CheckpointTest):
    def read(self, path):
        if os.path.exists(self.path("read.pt")):
            os.remove(self.path("read.pt"))
        self.run_program(PEER, "read", path, self.path("read.pt"))
        return torch.load(self.path("read.pt"), weights_only=True)

    def test_one_rank_both_ways(self):
        makers = [
            lambda p: torch.optim.Adam(p, lr=0.01),
            lambda p: torch.optim.SGD(p, lr=0.01),
            lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        ]
        for number, make in enumerate(makers):
            with self.subTest(number=number):
                model = make_model()
                optimizer = make(model.parameters())
                train(model, optimizer)
                state = {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict(),
                         "kinds": [torch.ones(2, dtype=d) for d in
                                   (torch.bfloat16, torch.half, torch.bool, torch.uint16)],
                         "conj": torch.tensor([1 - 2j]).conj(),
                         "text": "ümläut 🎉", "none": None, "pair": (1, 2.5)}  # fmt: skip
                expected = whole(state)
                theirs, ours = self.path(f"theirs{number}"), self.path(f"ours{number}")
                dcp.save(state, checkpoint_id=theirs, no_dist=True)
                self.assert_same(expected, self.read(theirs))

                self.run_program(PEER, "write", self.path("read.pt"), ours)
                other = make_model(seed=8)
                again = make(other.parameters())
                train(other, again)  # so that the optimizer has state to load into
                back = {"model": other.state_dict(), "optimizer": again.state_dict(), "text": ""}
                dcp.load(back, checkpoint_id=ours, no_dist=True)
                self.assertEqual(back["text"], "ümläut 🎉")
                # What C++ wrote, C++ reads.
                self.assert_same(expected, self.read(ours))
                again.load_state_dict(expected["optimizer"])
                train(model, optimizer, 1)
                train(other, again, 1)
                self.assert_same(dict(model.state_dict()), dict(other.state_dict()))

    def test_python_converts_what_we_wrote(self):
        """format_utils reads a checkpoint without knowing what is in it."""
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        value = {"a": {"b": torch.arange(6.0).reshape(2, 3), "c": [1, 2]}, "empty": torch.ones(0)}
        torch.save(value, self.path("value.pt"))
        self.run_program(PEER, "write", self.path("value.pt"), self.path("ours"))
        dcp_to_torch_save(self.path("ours"), self.path("back.pt"))
        self.assert_same(value, torch.load(self.path("back.pt"), weights_only=False))
        with open(os.path.join(self.path("ours"), ".metadata"), "rb") as file:
            metadata = pickle.load(file)
        self.assertEqual(metadata.planner_data["a.b"], ("a", "b"))
        self.assertEqual(metadata.state_dict_metadata["a.b"].size, torch.Size([2, 3]))

    def test_two_ranks_both_ways(self):
        for write_threads in (1, 2):
            folder = self.path(f"threads{write_threads}")
            os.mkdir(folder)
            mp.spawn(two_ranks, args=(folder, write_threads), nprocs=2)
            expected = torch.load(os.path.join(folder, "expected.pt"), weights_only=True)
            self.assert_same(expected, self.read(os.path.join(folder, "theirs")))
            self.assert_same(expected, self.read(os.path.join(folder, "ours")))
            flat = expected["columns"].flatten()
            for begin, end in ((0, 35), (3, 5), (6, 20), (34, 35), (7, 7)):
                out = os.path.join(folder, f"part_{begin}_{end}.pt")
                theirs = os.path.join(folder, "theirs")
                self.run_program(PEER, "part", theirs, "columns", begin, end, out)
                part = torch.load(out, weights_only=True)
                self.assert_same(part["columns"], flat[begin:end])

    def test_what_we_do_not_read_is_refused(self):
        out = self.path("out.pt")
        value = {"a": {"b": torch.ones(2), "object": torch.nn.Linear(1, 1)}}
        dcp.save(value, checkpoint_id=self.path("object"), no_dist=True)
        message = self.refused(PEER, "read", self.path("object"), out)
        self.assertIn("'a.object'", message)
        self.assertIn("torch.nn.modules.linear.Linear", message)
        dcp.save({"a": torch.ones(2)}, checkpoint_id=self.path("none"), no_dist=True)
        os.remove(os.path.join(self.path("none"), ".metadata"))
        self.assertIn("has no file .metadata", self.refused(PEER, "read", self.path("none"), out))
        self.assertFalse(os.path.exists(out))

    def test_extensions_are_refused_by_name(self):
        from torch.distributed.checkpoint._extension import StreamTransformExtension

        class Unchanged(StreamTransformExtension):
            @staticmethod
            def registry_name():
                return "stream.unchanged"

            @staticmethod
            def from_descriptor(version):
                return Unchanged()

            def get_descriptor(self):
                return "stream.unchanged/1"

            def transform_to(self, output):
                return output

            def transform_from(self, input):
                return input

        writer = FileSystemWriter(self.path("extended"), _extensions=[Unchanged()])
        dcp.save({"a": torch.ones(2)}, storage_writer=writer, no_dist=True)
        message = self.refused(PEER, "read", self.path("extended"), self.path("out.pt"))
        self.assertIn("stream.unchanged/1", message)
        self.assertIn("'a'", message)


if __name__ == "__main__":
    xml_unittest.main()
