"""Exchanges checkpoints of format `safetensors` with Python's safetensors package, both ways.

//tools:ckpt converts between `pt`, which torch reads, and `safetensors`.
"""

import json
import os
import subprocess

import numpy
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
import xml_unittest
from checkpoints import CheckpointTest, program

CKPT = program("tools/ckpt")

# What both torch and the package have.
DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool, torch.uint64, torch.uint32, torch.uint16,
    torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]  # fmt: skip


def every_dtype():
    return {
        str(dtype).split(".")[-1]: torch.arange(24).remainder(2).reshape(2, 3, 4).to(dtype)
        for dtype in DTYPES
    }


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(7, 5)
        self.head = torch.nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.norm = torch.nn.BatchNorm1d(5)


class SafetensorsInteropTest(CheckpointTest):
    def ckpt(self, *arguments):
        return self.run_program(CKPT, *arguments)

    def ours(self, value, name="ours.safetensors"):
        """A checkpoint folder of ours with `value`."""
        torch.save(value, self.path("theirs.pt"))
        self.ckpt("convert", self.path("theirs.pt"), self.path(name))
        return self.path(name)

    def read(self, path):
        """What C++ reads at `path`."""
        self.ckpt("convert", path, self.path("read.pt"), "--to=pt")
        value = torch.load(self.path("read.pt"), weights_only=True)
        os.remove(self.path("read.pt"))
        return value

    def assert_same_tensors(self, a, b):
        """Files have an order of their own."""
        self.assert_same(dict(sorted(a.items())), dict(sorted(b.items())))

    def test_python_loads_our_weights(self):
        model = {
            **every_dtype(),
            "scalar": torch.tensor(1.5),
            "empty": torch.zeros(0, 5),
            "channels_last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
            "transposed": torch.rand(3, 4).t(),
            'ünï "quoted"\n': torch.ones(2),
        }
        folder = self.ours({"model": model, "epoch": 3})
        file = os.path.join(folder, "model.safetensors")
        self.assert_same_tensors(model, safetensors.torch.load_file(file))
        with safetensors.safe_open(file, framework="pt") as opened:
            self.assertEqual(opened.metadata()["format"], "pt")
            part = opened.get_slice("float32")[1:, 2]
            self.assertTrue(torch.equal(part, model["float32"][1:, 2]))
        with open(file, "rb") as opened:
            self.assert_same_tensors(model, safetensors.torch.load(opened.read()))
        plain = {k: model[k] for k in ("float32", "int64", "bool", "scalar", "channels_last")}
        arrays = safetensors.numpy.load_file(
            os.path.join(self.ours({"model": plain}, "plain.safetensors"), "model.safetensors")
        )
        for name, tensor in plain.items():
            numpy.testing.assert_array_equal(arrays[name], tensor.numpy())
        with open(os.path.join(folder, "model.safetensors.index.json"), encoding="utf-8") as opened:
            index = json.load(opened)
        self.assertEqual(set(index["weight_map"]), set(model))
        self.assertEqual(set(index["weight_map"].values()), {"model.safetensors"})
        self.assertEqual(
            index["metadata"]["total_size"], sum(t.numel() * t.itemsize for t in model.values())
        )

    def test_python_reads_our_training_state(self):
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        model(torch.rand(4, 3)).sum().backward()
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
        folder = self.ours(state)
        with safetensors.safe_open(os.path.join(folder, "training_state"), "pt") as opened:
            moment = opened.get_tensor("optimizer.state.0.exp_avg")
            values = json.loads(opened.metadata()["ddp.state"])
        self.assertTrue(torch.equal(moment, optimizer.state_dict()["state"][0]["exp_avg"]))
        self.assertIn(["epoch", 3], values["dict"])
        read = self.read(folder)
        again = torch.optim.Adam(model.parameters(), lr=0.5)
        again.load_state_dict(read["optimizer"])
        self.assertEqual(again.param_groups[0]["lr"], 0.1)
        self.assertEqual(again.param_groups[0]["betas"], (0.9, 0.999))

    def test_our_bytes_are_the_packages(self):
        """Without our checksums a file is the one that the package writes."""
        model = {**every_dtype(), "b": torch.ones(3), "a": torch.zeros(0), "s": torch.tensor(2.0)}
        folder = self.ours({"model": model})
        theirs = safetensors.torch.save(model)
        with open(os.path.join(folder, "model.safetensors"), "rb") as opened:
            ours = opened.read()
        headers = []
        for data in (theirs, ours):
            length = int.from_bytes(data[:8], "little")
            self.assertEqual(length % 8, 0)
            header = json.loads(data[8 : 8 + length])
            header.pop("__metadata__", None)
            headers.append((list(header.items()), data[8 + length :]))
        self.assertEqual(headers[0], headers[1])

    def test_we_read_what_python_wrote(self):
        model = {**every_dtype(), "scalar": torch.tensor(7), "empty": torch.zeros(2, 0)}
        file = self.path("x.safetensors")
        for metadata in (None, {"format": "pt", "author": "ü"}):
            safetensors.torch.save_file(model, file, metadata=metadata)
            self.assert_same_tensors(model, self.read(file)["model"])
        listed = json.loads(self.ckpt("ls", "--json", file))
        self.assertEqual(len(listed["tensors"]), len(model))
        self.assertIn("unverified", self.ckpt("verify", file))
        arrays = {"a": numpy.arange(6.0).reshape(2, 3), "b": numpy.array([True, False])}
        safetensors.numpy.save_file(arrays, file)
        for name, tensor in self.read(file)["model"].items():
            numpy.testing.assert_array_equal(tensor.numpy(), arrays[name])

    def test_tied_weights(self):
        tied = Tied()
        folder = self.ours({"model": tied.state_dict()})
        file = os.path.join(folder, "model.safetensors")
        self.assertNotIn("head.weight", safetensors.torch.load_file(file))
        other = Tied()
        safetensors.torch.load_model(other, file)
        self.assert_same_tensors(tied.state_dict(), other.state_dict())
        # The reverse, and whose names the package keeps.
        theirs = self.path("tied.safetensors")
        safetensors.torch.save_model(tied, theirs)
        self.assertEqual(
            set(safetensors.torch.load_file(theirs)), set(safetensors.torch.load_file(file))
        )
        read = self.read(theirs)["model"]
        self.assert_same_tensors(dict(tied.state_dict()), read)
        self.assertEqual(read["head.weight"].data_ptr(), read["embed.weight"].data_ptr())

    def test_models_in_several_files(self):
        folder = self.path("llm")
        os.mkdir(folder)
        parts = [{"a": torch.rand(3)}, {"b": torch.rand(2, 2), "c": torch.rand(1)}]
        weight_map = {}
        for i, part in enumerate(parts):
            name = f"model-{i + 1:05}-of-00002.safetensors"
            safetensors.torch.save_file(part, os.path.join(folder, name), {"format": "pt"})
            weight_map.update({key: name for key in part})
        with open(os.path.join(folder, "model.safetensors.index.json"), "w") as opened:
            json.dump({"metadata": {"total_size": 32}, "weight_map": weight_map}, opened)
        self.assert_same_tensors({**parts[0], **parts[1]}, self.read(folder)["model"])

    def test_what_the_package_refuses_we_refuse(self):
        good = safetensors.torch.save({"a": torch.arange(4.0)})
        length = int.from_bytes(good[:8], "little")
        header, data = good[8 : 8 + length], good[8 + length :]

        def file_of(header, data=data, length=None):
            return (length or len(header)).to_bytes(8, "little") + header + data

        cases = {
            "hole": file_of(header.replace(b"[0,16]", b"[1,17]"), b"x" + data),
            "more": file_of(header, data + b"x"),
            "less": file_of(header, data[:-1]),
            "shape": file_of(header.replace(b"[4]", b"[5]")),
            "dtype": file_of(header.replace(b"F32", b"F31")),
            "negative": file_of(header.replace(b"[4]", b"[-4]")),
            "length": file_of(header, length=1 << 40),
            "no JSON": file_of(b"{" + header[2:]),
            "metadata": file_of(b'{"__metadata__":{"a":1},' + header[1:]),
        }
        for name, contents in cases.items():
            with self.subTest(name):
                with self.assertRaises(Exception):
                    safetensors.torch.load(contents)
                path = self.path("bad.safetensors")
                with open(path, "wb") as opened:
                    opened.write(contents)
                done = subprocess.run([CKPT, "verify", path], capture_output=True, text=True)
                self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
                self.assertIn("damaged", done.stdout)


if __name__ == "__main__":
    xml_unittest.main()
