"""Exchanges checkpoints of format `pt` between //checkpoint and Python's torch, both ways."""

import collections
import os
import subprocess
import zipfile

import torch
import xml_unittest
from checkpoints import CheckpointTest, program

PEER = program("tests/interop/checkpoint_peer")


def make_net():
    """The network of checkpoint_peer.cc."""
    net = torch.nn.Module()
    net.features = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3, bias=False), torch.nn.BatchNorm2d(4)
    )
    net.head = torch.nn.Linear(4, 2)
    net.scale = torch.nn.Parameter(torch.rand(1))
    return net


def train_params(params, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        sum(p.pow(3).sum() for p in params).backward()
        optimizer.step()


class CheckpointInteropTest(CheckpointTest):
    def peer(self, *arguments):
        """Runs the C++ side; its last argument is the file it writes, which is loaded here."""
        self.run_program(PEER, *arguments)
        return torch.load(arguments[-1], weights_only=True)

    def save(self, value, name="theirs.pt", **options):
        torch.save(value, self.path(name), **options)
        return self.path(name)

    def test_python_loads_our_sample(self):
        sample = self.peer("sample", self.path("ours.pt"))
        tensors = sample["tensors"]
        counting = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
        for name, dtype in {
            "Float": torch.float32, "Double": torch.float64, "Half": torch.float16,
            "BFloat16": torch.bfloat16, "Long": torch.int64, "Int": torch.int32,
            "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8, "Bool": torch.bool,
            "ComplexFloat": torch.complex64, "ComplexDouble": torch.complex128,
            "UInt16": torch.uint16, "UInt32": torch.uint32, "UInt64": torch.uint64,
        }.items():  # fmt: skip
            self.assert_same(tensors[name], counting.to(dtype), name)
        self.assertEqual(tensors["Float8_e4m3fn"].dtype, torch.float8_e4m3fn)
        self.assert_same(tensors["Float8_e4m3fn"].float(), counting.to(torch.float8_e4m3fn).float())
        self.assert_same(tensors["transposed"], counting.transpose(0, 2))
        self.assert_same(tensors["every other"], counting[:, :, 1])
        self.assertEqual(
            tensors["shared"].untyped_storage().data_ptr(),
            tensors["transposed"].untyped_storage().data_ptr(),
        )
        self.assertEqual(tensors["no dimensions"].shape, ())
        self.assertEqual(tensors["no elements"].shape, (0, 5))
        self.assertTrue(tensors["special"][0].isnan())
        self.assertEqual(
            sample["integers"],
            [0, 255, 256, -1, 65536, 2**31 - 1, -(2**31), 2**31, 2**63 - 1, -(2**63)],
        )
        self.assertEqual(sample["tuple"], (0.9, True))
        self.assertEqual(sample["by number"], {0: "zero", -7: "minus seven"})
        self.assertEqual(sample["text"], 'Grüße, 世界 🎉\n"quoted"')
        self.assertIsNone(sample["none"])

    def test_our_file_is_a_sound_archive(self):
        self.peer("sample", self.path("ours.pt"))
        with zipfile.ZipFile(self.path("ours.pt")) as archive:
            self.assertIsNone(archive.testzip())
        mapped = torch.load(self.path("ours.pt"), weights_only=True, mmap=True)
        self.assert_same(mapped["tensors"]["Long"], torch.arange(24).reshape(2, 3, 4))

    def test_we_read_what_python_wrote(self):
        base = torch.arange(12.0)
        shared = [1, 2]
        value = {
            "state_dict": make_net().state_dict(),
            "ordered": collections.OrderedDict(b=1, a=2),
            "nested": {"list": [1, 2.5, "x", None, True, (1, (2,))], "empty": [{}, [], ()]},
            "numbers": {0: "int keys", -3: 2**62, 5: -(2**40)},
            "twice": [shared, shared],
            "views": [base, base[3:6], base.view(3, 4).t()],
            "kinds": [torch.ones(2, dtype=d) for d in (torch.bfloat16, torch.half, torch.bool)],
            "young": torch.arange(3).to(torch.uint16),
            "scalar": torch.tensor(1.5),
            "text": "ümläut 🎉",
            "float": 1e-300,
        }
        copied = self.peer("copy", self.save(value), self.path("ours.pt"))
        value["state_dict"] = dict(value["state_dict"])
        self.assert_same(value, copied)
        self.assertEqual(
            copied["views"][0].untyped_storage().data_ptr(),
            copied["views"][1].untyped_storage().data_ptr(),
        )
        parameter = self.peer(
            "copy", self.save({"p": torch.nn.Parameter(torch.ones(3))}), self.path("parameter.pt")
        )
        self.assert_same(parameter["p"], torch.ones(3))
        scheduler = torch.optim.lr_scheduler.MultiStepLR(
            torch.optim.SGD([torch.ones(1)], lr=0.1), [3, 3, 5]
        ).state_dict()
        copied = self.peer("copy", self.save({"s": scheduler}), self.path("scheduler.pt"))
        self.assertEqual(copied["s"]["milestones"], {3: 2, 5: 1})

    def test_what_we_do_not_read_is_refused(self):
        out = self.path("out.pt")
        old = self.save({"a": 1}, "old.pt", _use_new_zipfile_serialization=False)
        self.assertIn("before version 1.6", self.refused(PEER, "copy", old, out))
        script = self.path("script.pt")
        torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), script)
        self.assertIn("TorchScript", self.refused(PEER, "copy", script, out))
        whole = self.save({"net": torch.nn.Linear(1, 1)})
        self.assertIn("'torch.nn.modules.linear.Linear'", self.refused(PEER, "copy", whole, out))
        tagged = self.save({"a": [torch.ones(2), {1, 2}]})
        self.assertIn("'a/1' is a set", self.refused(PEER, "copy", tagged, out))
        self.assertIn("dict is needed", self.refused(PEER, "copy", self.save([1]), out))
        self.assertFalse(os.path.exists(out))

    def test_lazy_conjugates_and_what_else_is_not_plain(self):
        base = torch.tensor([1 + 2j, 3 - 4j])
        imag = base.clone().conj().imag  # torch.save refuses to see a storage through two types
        value = {
            "views": [base, base.conj(), imag, torch._neg_view(base.conj())],
            "new": {
                str(d): torch.arange(6).to(d)
                for d in (torch.complex32, torch.float8_e5m2fnuz, torch.float8_e8m0fnu)
            },
            "keys": {0.5: 1, True: 2, 7: 3, "x": 4},
            "complex": 1 - 2j,
            "surrogate": "\udcff",
        }
        for protocol in range(2, 6):
            path = self.save(value, pickle_protocol=protocol)
            copied = self.peer("copy", path, self.path(f"ours{protocol}.pt"))
            for theirs, ours in zip(value["views"], copied["views"]):
                self.assertTrue(torch.equal(theirs, ours))
                self.assertEqual(theirs.is_conj(), ours.is_conj())
                self.assertEqual(theirs.is_neg(), ours.is_neg())
            pointers = {v.untyped_storage().data_ptr() for v in copied.pop("views")}
            self.assertEqual(len(pointers), 2)
            for name, tensor in value["new"].items():
                ours = copied["new"][name]
                self.assertEqual(tensor.dtype, ours.dtype)
                width = {1: torch.uint8, 4: torch.int32}[tensor.element_size()]
                self.assert_same(tensor.view(width), ours.view(width), name)
            del copied["new"]
            rest = {key: value[key] for key in ("keys", "complex", "surrogate")}
            self.assertEqual(copied, rest)
            kinds = [type(key) for key in value["keys"]]  # 1 == True
            self.assertEqual([type(key) for key in copied["keys"]], kinds)

    def test_files_without_checksums(self):
        torch.serialization.set_crc32_options(False)
        try:
            path = self.save({"w": torch.arange(5.0)})
        finally:
            torch.serialization.set_crc32_options(True)
        copied = self.peer("copy", path, self.path("ours.pt"))
        self.assert_same(torch.arange(5.0), copied["w"])

    def test_module_state(self):
        net = make_net()
        net.features(torch.rand(8, 1, 5, 5))  # running statistics
        for prefix in ("", "module.", "_orig_mod.", "module._orig_mod."):
            state = {prefix + key: value for key, value in net.state_dict().items()}
            ours = self.peer("module", self.save({"model": state}), self.path(prefix + "ours.pt"))
            self.assert_same(dict(net.state_dict()), ours["model"])
            make_net().load_state_dict(ours["model"])
        wrong = dict(net.state_dict())
        wrong["head.weight"] = torch.zeros(2, 5)
        message = self.refused(PEER, "module", self.save({"model": wrong}), self.path("none.pt"))
        self.assertIn("head.weight (model [2, 4], checkpoint [2, 5])", message)

    def test_optimizers_continue_on_the_other_side(self):
        cases = {
            "sgd": [
                lambda p: torch.optim.SGD(p, lr=0.01),
                lambda p: torch.optim.SGD(
                    p, lr=0.01, momentum=0.9, weight_decay=0.1, nesterov=True
                ),
            ],
            "adam": [
                lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.8, 0.99), weight_decay=0.1),
                lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
            ],
            "adamw": [
                lambda p: torch.optim.AdamW(p, lr=0.01),
                lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
            ],
        }
        for kind, makers in cases.items():
            for number, make in enumerate(makers):
                for ranks in (0, 2, 3):  # 0: the optimizer itself; else a sharded one
                    with self.subTest(kind=kind, number=number, ranks=ranks):
                        self.continues(kind, make, ranks, self.path(f"{kind}{number}_{ranks}.pt"))

    def continues(self, kind, make, ranks, path):
        params = [torch.rand(30, 2).requires_grad_(), torch.rand(4).requires_grad_()]
        optimizer = make(params)
        train_params(params, optimizer, 3)
        name = self.save(
            {
                "params": [p.detach() for p in params],
                "optimizer": optimizer.state_dict(),
            }
        )
        ours = self.peer("train", kind, 2, ranks, name, path)
        train_params(params, optimizer, 2)
        self.assert_close(params, ours["params"])

        resumed = [p.clone().requires_grad_() for p in ours["params"]]
        again = make(resumed)
        again.load_state_dict(ours["optimizer"])
        self.assertEqual(
            list(again.state_dict()["param_groups"][0]),
            list(optimizer.state_dict()["param_groups"][0]),
        )
        train_params(params, optimizer, 1)
        train_params(resumed, again, 1)
        self.assert_close(params, resumed)

    def assert_close(self, a, b):
        for x, y in zip(a, b):
            torch.testing.assert_close(x.detach(), y.detach(), rtol=1e-6, atol=1e-7)

    def test_random_state(self):
        torch.manual_seed(11)
        torch.randn(3)
        name = self.save({"rng": torch.get_rng_state()})
        ours = self.peer("rng", name, self.path("ours.pt"))
        self.assert_same(torch.randn(5), ours["drawn"])
        expected = torch.randn(4)
        torch.set_rng_state(ours["rng"])
        self.assert_same(torch.randn(4), expected)


if __name__ == "__main__":
    xml_unittest.main()
