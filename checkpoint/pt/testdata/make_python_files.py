"""Writes the files python_*.pt and not_*.pt of this folder with Python's torch.

    make_python_files.py FOLDER

The files here were written with the version that third_party/python_torch pins. The same script
gives the same values, but not the same bytes. pt_test.cc says what is in them.
"""

import argparse
import collections
import os
import sys

import torch

torch.manual_seed(0)


def tensors():
    counting = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    by_dtype = {}
    for name in (
        "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex128 complex64 "
        "complex32 uint16 uint32 uint64 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz "
        "float8_e8m0fnu"
    ).split():
        by_dtype[name] = counting.to(getattr(torch, name))
    for name in "bits8 bits1x8 bits2x4 bits4x2 float4_e2m1fn_x2".split():
        by_dtype[name] = torch.arange(6, dtype=torch.uint8).view(getattr(torch, name))
    by_dtype["bits16"] = torch.arange(6, dtype=torch.int16).view(torch.bits16)
    return by_dtype


def views():
    base = torch.tensor([1 + 2j, 3 - 4j])
    return {
        "base": base,
        "conj": base.conj(),
        # torch.save refuses to see one storage through two types.
        "neg": base.clone().conj().imag,
        "both": torch._neg_view(base.conj()),
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
    }


def with_attributes():
    parameter = torch.nn.Parameter(torch.arange(3.0))
    tagged = torch.nn.Parameter(torch.arange(3.0) + 1, requires_grad=False)
    tagged.tag = "tag"
    plain = torch.arange(3.0) + 2
    plain.tag = [1]
    return {
        "parameter": parameter,
        "tagged": tagged,
        "buffer": torch.nn.Buffer(torch.arange(3.0) + 3),
        "plain": plain,
    }


def sparse():
    dense = torch.tensor([[0.0, 2, 0, 0], [3, 0, 0, 4]])
    return {
        "coo": dense.to_sparse(),
        "uncoalesced": torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 1.0], (2, 4)),
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((2, 2)),
        "bsc": dense.to_sparse_bsc((2, 2)),
    }


def plain():
    shared = ["shared"]
    return {
        "none": None,
        "bool": True,
        "int": -(2**62),
        "float": 0.1,
        "complex": 1 - 2j,
        "text": "Grüße 🎉",
        "surrogate": "file\udcff",
        "bytes": b"\x00\x7f\x80\xff",
        "no bytes": b"",
        "bytearray": bytearray(b"\xfe\x01"),
        "tuple": (1, (2.5, None)),
        "lists": [shared, shared],
        "keys": {"a": 0, 2: 1, 0.5: 2, True: 3, -1.0: 4},
        "ordered": collections.OrderedDict(b=1, a=2),
        "counter": collections.Counter("aab"),
        "size": torch.Size([2, 3]),
        "device": torch.device("cuda", 1),
        "dtype": torch.float16,
        "layout": torch.sparse_coo,
    }


class Subclass(torch.Tensor):
    pass


def quantized():
    values = torch.arange(-6.0, 6.0).reshape(3, 4)
    scales, zero_points = torch.tensor([0.5, 0.25, 1.0]), torch.tensor([0, 1, -2])
    by_channel = torch.quantize_per_channel(values, scales, zero_points, 0, torch.qint8)
    return {
        "qint8": torch.quantize_per_tensor(values, 0.5, 2, torch.qint8),
        "quint8": torch.quantize_per_tensor(values, 0.25, 100, torch.quint8),
        "qint32": torch.quantize_per_tensor(values, 0.125, -3, torch.qint32),
        "by channel": by_channel,
        "parameter": torch.nn.Parameter(by_channel, requires_grad=False),
        "view": torch.quantize_per_tensor(values, 0.5, 2, torch.qint8)[1:, 2:],
    }


def unsupported():
    scales, zero_points = torch.tensor([0.5, 0.25]), torch.tensor([0.0, 1.0])
    values = torch.arange(8.0).reshape(2, 4)
    halves_of_bytes = torch.quantize_per_channel(values, scales, zero_points, 0, torch.quint4x2)
    itself = [1]
    itself.append(itself)
    return {
        "epoch": 3,
        "weights": torch.arange(3.0),
        "halves of bytes": halves_of_bytes,
        "nested": torch.nested.nested_tensor([torch.arange(2.0), torch.arange(3.0)]),
        "meta": torch.empty(2, device="meta"),
        "subclass": torch.arange(2.0).as_subclass(Subclass),
        "set": {1, 2},
        "object": argparse.Namespace(lr=0.1),
        "long": 2**64,
        "by tuple": {(1, 2): 3, "kept": 4},
        "list": [1, {2}, 3],
        "storage": torch.arange(3.0).untyped_storage(),
        "itself": itself,
    }


def main():
    folder = sys.argv[1]

    def save(value, name, **options):
        torch.save(value, os.path.join(folder, name), **options)

    values = {
        "tensors": tensors(),
        "views": views(),
        "attributes": with_attributes(),
        "sparse": sparse(),
        "plain": plain(),
    }
    save(values, "python_values.pt")
    for protocol in (3, 4, 5):
        some = {"plain": plain(), "views": views()}
        save(some, "python_protocol_%d.pt" % protocol, pickle_protocol=protocol)
    save(quantized(), "python_quantized.pt")
    save(unsupported(), "python_unsupported.pt")

    model = {"model": collections.OrderedDict({"fc.weight": torch.arange(6.0).reshape(2, 3)})}
    torch.serialization.set_crc32_options(False)
    save(dict(model, views=views(), attributes=with_attributes(), sparse=sparse()), "python_no_crc.pt")
    torch.serialization.set_crc32_options(True)
    save(model, "not_a_zip.pt", _use_new_zipfile_serialization=False)
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), os.path.join(folder, "not_a_dict.pt"))


if __name__ == "__main__":
    main()
