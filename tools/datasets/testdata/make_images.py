#!/usr/bin/env python3
"""Makes images/, and images/expected.txt with what PIL has to say about them.

Run with the PIL of third_party/python_torch/requirements.txt. A line of expected.txt is a file, its
size, the CRC-32 of its pixels (convert("RGB")), and the CRC-32s of them after torchvision's Resize
and CenterCrop to 5, 16 and 40 pixels.
"""

import os
import struct
import zlib

from PIL import Image

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "images")
WIDTH, HEIGHT = 23, 17


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width, height, depth, colour, lines, interlace=0):
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlace)
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
            + chunk(b"IDAT", zlib.compress(b"".join(b"\0" + line for line in lines), 9))
            + chunk(b"IEND", b""))  # fmt: skip


def pixel(x, y):
    return (11 * x % 256, (15 * y + x * x) % 256, 255 - 7 * (x ^ y))


def resized(image, size):
    """torchvision.transforms.Resize(size) and CenterCrop(size)."""
    width, height = image.size
    short, long = min(width, height), max(width, height)
    scaled = int(size * long / short)
    width, height = (size, scaled) if width <= height else (scaled, size)
    left, top = int(round((width - size) / 2.0)), int(round((height - size) / 2.0))
    image = image.resize((width, height), Image.BILINEAR)
    return image.crop((left, top, left + size, top + size))


def main():
    os.makedirs(FOLDER, exist_ok=True)
    rgb = Image.new("RGB", (WIDTH, HEIGHT))
    rgb.putdata([pixel(x, y) for y in range(HEIGHT) for x in range(WIDTH)])
    alpha = rgb.copy()
    alpha.putalpha(rgb.convert("L"))
    palette = rgb.quantize(7)
    rows = [[pixel(x, y) for x in range(WIDTH)] for y in range(HEIGHT)]

    def save(image, name, **options):
        image.save(os.path.join(FOLDER, name), **options)

    def write(name, data):
        with open(os.path.join(FOLDER, name), "wb") as f:
            f.write(data)

    save(rgb, "rgb_420.jpg", quality=90, subsampling=2)
    save(rgb, "rgb_444.JPEG", format="JPEG", quality=95, subsampling=0)
    save(rgb, "progressive.jpg", quality=80, progressive=True)
    save(rgb.rotate(90, expand=True), "tall.jpg", quality=90)
    save(rgb.convert("L"), "grey.jpg")
    save(rgb.convert("CMYK"), "cmyk.jpg", quality=90)
    save(rgb, "really_png.jpg", format="PNG")
    save(rgb, "rgb.png")
    save(alpha, "rgba.png")
    save(rgb.convert("L"), "grey.png")
    save(alpha.convert("LA"), "grey_alpha.png")
    save(palette, "palette.png")
    save(palette, "palette_transparent.png", transparency=3)
    save(rgb.convert("1"), "one_bit.png")
    wide = [b"".join(struct.pack(">3H", *(257 * v - (v > 9) * 200 for v in p)) for p in row) for row in rows]
    write("rgb_16.png", png(WIDTH, HEIGHT, 16, 2, wide))
    # Around 255, where convert("RGB") clips.
    grey = [b"".join(struct.pack(">H", sum(p) // 2 * (1 + (sum(p) % 5 == 0) * 80)) for p in row) for row in rows]
    write("grey_16.png", png(WIDTH, HEIGHT, 16, 0, grey))
    # PIL cannot write these; what it reads tells that they are right.
    passes = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]
    lines = [b"".join(bytes(rows[y][x]) for x in range(left, WIDTH, across))
             for left, top, across, down in passes for y in range(top, HEIGHT, down)]  # fmt: skip
    write("interlaced.png", png(WIDTH, HEIGHT, 8, 2, lines, interlace=1))

    with open(os.path.join(FOLDER, "expected.txt"), "w") as f:
        for name in sorted(os.listdir(FOLDER)):
            if name == "expected.txt":
                continue
            image = Image.open(os.path.join(FOLDER, name)).convert("RGB")
            sums = [image] + [resized(image, size) for size in (5, 16, 40)]
            f.write("%s %d %d %s\n" % (
                name, image.width, image.height, " ".join("%08x" % zlib.crc32(s.tobytes()) for s in sums)))  # fmt: skip


if __name__ == "__main__":
    main()
