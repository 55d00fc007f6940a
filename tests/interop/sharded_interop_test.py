"""Python reads what C++ ranks have saved in format `sharded`, with and without //tools:ckpt."""

import json
import os

import safetensors
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
import xml_unittest
from checkpoints import CheckpointTest, program, same_bits, train
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import Shard, distribute_tensor

PEER = program("tests/interop/checkpoint_peer")
CKPT = program("tools/ckpt")


class Model(torch.nn.Module):
    """Has a tensor that the ranks write in rows (8 MiB and more), and buffers of other dtypes."""

    def __init__(self, seed=7):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(1501, 1500)
        self.norm = torch.nn.BatchNorm1d(6)
        self.head = torch.nn.Linear(6, 3)
        self.scale = torch.nn.Parameter(torch.tensor(1.5))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("sixteen", torch.arange(5).to(torch.bfloat16) + seed)
        self.register_buffer("young", (torch.arange(3) + seed).to(torch.uint16))
        self.register_buffer("eight", torch.arange(4.0).to(torch.float8_e4m3fn))
        self.register_buffer("empty", torch.zeros(0, 4))

    def forward(self, inputs):
        return self.head(self.norm(inputs)) * self.scale + self.embed.weight[:4, :3]


def make(seed=7):
    model = Model(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model, optimizer)
    return model, optimizer


def load_as_rank(rank, path, expected_path, store):
    """One of two ranks, each of which holds some columns, or rows, of the large tensor."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    for dimension in (0, 1):
        part = distribute_tensor(torch.zeros(1501, 1500), mesh, [Shard(dimension)])
        state = {"model": {"embed": {"weight": part}}}
        dcp.load(state, storage_reader=HuggingFaceStorageReader(path))
        expected = torch.load(expected_path, weights_only=True)["model"]["embed.weight"]
        assert same_bits(part.full_tensor(), expected)
    dist.destroy_process_group()


class ShardedInteropTest(CheckpointTest):
    def save(self, ranks, model, optimizer):
        """A checkpoint of C++ ranks with this model, and state divided among them."""
        state = {
            "model": dict(model.state_dict()),
            "optimizer": optimizer.state_dict(),
            "names": [name for name, _ in model.named_parameters()],
        }
        torch.save(state, self.path("in.pt"))
        self.run_program(PEER, "sharded", ranks, self.path("in.pt"), self.path(f"run{ranks}"))
        return self.path(f"run{ranks}/epoch_3.sharded")

    def load_model(self, path, into):
        """By Python's DCP, from the safetensors files alone."""
        state = {"model": into.state_dict()}
        dcp.load(state, storage_reader=HuggingFaceStorageReader(path), no_dist=True)
        into.load_state_dict(state["model"])

    def test_the_model_is_read_without_a_pickle(self):
        model, optimizer = make()
        expected = dict(model.state_dict())
        for ranks in (1, 2, 3):
            with self.subTest(ranks=ranks):
                path = self.save(ranks, model, optimizer)
                files = sorted(f for f in os.listdir(path) if f.endswith(".safetensors"))
                self.assertEqual(len(files), ranks)
                other, _ = make(seed=8)
                self.load_model(path, other)
                self.assert_same(expected, dict(other.state_dict()))
                # A part of it, as a program does that has only some of the layers.
                state = {"model": {"head": torch.nn.Linear(6, 3).state_dict()}}
                dcp.load(state, storage_reader=HuggingFaceStorageReader(path), no_dist=True)
                self.assert_same(dict(model.head.state_dict()), dict(state["model"]["head"]))

    def test_each_rank_reads_its_part_without_a_pickle(self):
        path = self.save(3, *make())
        arguments = (path, self.path("in.pt"), self.path("store"))
        mp.spawn(load_as_rank, args=arguments, nprocs=2)

    def test_the_package_reads_each_file(self):
        model, optimizer = make()
        expected = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
        for ranks in (1, 2, 3):
            path = self.save(ranks, model, optimizer)
            found = {}
            for name in sorted(os.listdir(path)):
                if not name.endswith((".safetensors", ".ranges")):
                    continue
                file = os.path.join(path, name)
                tensors = safetensors.torch.load_file(file)
                with safetensors.safe_open(file, framework="pt") as opened:
                    metadata = opened.metadata() or {}
                if name.endswith(".ranges"):
                    self.assertTrue(tensors)
                    continue
                info = json.loads(metadata["DCP_SHARDING_INFO"])
                for key, tensor in tensors.items():
                    begin = info[key]["saved_offsets"]
                    found.setdefault(key, []).append((begin, tensor))
            self.assertLessEqual(set(expected), set(found))
            for key, tensor in expected.items():
                pieces, rows = [], 0
                for begin, piece in sorted(found[key], key=lambda item: item[0]):
                    self.assertEqual(begin, [rows, *[0] * (piece.dim() - 1)][: piece.dim()], key)
                    rows += len(piece) if piece.dim() > 0 else 0
                    pieces.append(piece)
                self.assert_same(tensor, torch.cat(pieces) if len(pieces) > 1 else pieces[0], key)

    def test_python_goes_on_with_the_optimizer(self):
        """sharded -> dcp -> Python's dcp.load, with moments, steps and options."""
        model, optimizer = make()
        for ranks in (1, 2, 3):
            with self.subTest(ranks=ranks):
                path = self.save(ranks, model, optimizer)
                converted = self.path(f"dcp{ranks}")
                self.run_program(CKPT, "convert", path, converted, "--to=dcp")
                other, again = make(seed=8)
                again.param_groups[0]["lr"] = 0.5
                model_state, optimizer_state = get_state_dict(other, again)
                state = {"model": model_state, "optimizer": optimizer_state, "epoch": 0}
                dcp.load(state, checkpoint_id=converted, no_dist=True)
                set_state_dict(other, again, model_state_dict=state["model"],
                               optim_state_dict=state["optimizer"])  # fmt: skip
                self.assertEqual(state["epoch"], 3)
                self.assertEqual(again.param_groups[0]["lr"], 0.01)
                self.assert_same(dict(model.state_dict()), dict(other.state_dict()))
                mine, theirs = make()
                train(mine, theirs, 1)
                train(other, again, 1)
                self.assert_same(dict(mine.state_dict()), dict(other.state_dict()))

    def test_python_loads_what_ckpt_made_a_file_of(self):
        """sharded -> pt -> torch.load, and -> safetensors -> load_file."""
        model, optimizer = make()
        for ranks in (1, 2, 3):
            with self.subTest(ranks=ranks):
                path = self.save(ranks, model, optimizer)
                self.run_program(CKPT, "convert", path, self.path(f"{ranks}.pt"))
                loaded = torch.load(self.path(f"{ranks}.pt"), weights_only=True)
                self.assert_same(dict(model.state_dict()), loaded["model"])
                self.assertEqual(loaded["epoch"], 3)
                self.assertEqual(loaded["per_rank"]["rank"], list(range(ranks)))
                # By names, as torch.distributed.checkpoint has them, in PyTorch's order.
                numbers = optimizer.state_dict()["state"]
                state = loaded["optimizer"]["state"]
                names = [name for name, _ in model.named_parameters()]
                self.assertEqual(set(state), {name for i, name in enumerate(names) if i in numbers})
                for i, name in enumerate(names):
                    if i in numbers:
                        for key, value in numbers[i].items():
                            self.assert_same(value, state[name][key], f"{name}/{key}")
                self.assertEqual(loaded["optimizer"]["param_groups"][0]["params"], names)
                # Which PyTorch's own optimizer takes, by the order of parameters.
                mine, theirs = make()
                other, again = make(seed=8)
                other.load_state_dict(loaded["model"])
                again.load_state_dict(loaded["optimizer"])
                train(mine, theirs, 1)
                train(other, again, 1)
                self.assert_same(dict(mine.state_dict()), dict(other.state_dict()))
                out = self.path(f"{ranks}.safetensors")
                self.run_program(CKPT, "convert", path, out, "--only=model/*")
                file = os.path.join(out, "model.safetensors")
                self.assert_same(
                    dict(sorted(model.state_dict().items())),
                    dict(sorted(safetensors.torch.load_file(file).items())),
                )

    def test_the_same_at_each_world_size(self):
        model, optimizer = make()
        for ranks in (2, 3):
            first = self.path("run1/epoch_3.sharded")
            if not os.path.exists(first):
                self.save(1, model, optimizer)
            path = self.save(ranks, model, optimizer)
            for part in ("model/*", "optimizer/*"):
                for name, source in (("a.pt", first), ("b.pt", path)):
                    self.run_program(CKPT, "convert", source, self.path(name), f"--only={part}")
                self.assertEqual(
                    self.run_program(CKPT, "diff", self.path("a.pt"), self.path("b.pt")), "equal\n"
                )
                os.remove(self.path("a.pt"))
                os.remove(self.path("b.pt"))

    def test_ckpt_lists_and_averages_them(self):
        a = self.save(2, *make())
        b = self.save(3, *make(seed=8))
        listed = json.loads(self.run_program(CKPT, "ls", "--json", a))
        shapes = {row["name"]: row["shape"] for row in listed["tensors"]}
        self.assertEqual(shapes["model/embed.weight"], [1501, 1500])
        self.assertEqual(shapes["optimizer/state/head.weight/exp_avg"], [3, 6])
        self.run_program(CKPT, "average", a, b, f"--to={self.path('mean.pt')}")
        mean = torch.load(self.path("mean.pt"), weights_only=True)["model"]
        x, y = make()[0].state_dict(), make(seed=8)[0].state_dict()
        for name in x:
            if x[name].is_floating_point():
                expected = ((x[name].double() + y[name].double()) / 2).to(x[name].dtype)
                self.assert_same(expected, mean[name], name)
            else:
                self.assert_same(y[name], mean[name], name)


if __name__ == "__main__":
    xml_unittest.main()
