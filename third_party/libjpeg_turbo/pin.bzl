"""What third_party/libjpeg_turbo brings, from where, under which licence, and why."""

PIN = struct(
    folder = "libjpeg_turbo",
    version = "2.1.5",
    kind = "debian-source",
    what = ["libjpeg-turbo", "trixie"],
    sha256 = "254f3642b04e309fee775123133c6464181addc150499561020312ec61c1bf7c",
    licence = "IJG, BSD-3-Clause",
    why = "Reads JPEG images of data sets. Only the decoder is built, in C: its assembly needs nasm.",
)
