"""The format of an image by its first bytes, never by its name; and a true name for what is not read."""

from __future__ import annotations

from ...errors import RecordRejected

HEIF_BRANDS = frozenset([b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"])  # ISO/IEC 23008-12
AVIF_BRANDS = frozenset([b"avif", b"avis"])
BRANDS_END = 64  # the first of a file's compatible brands lie before this byte
EXPECTED = "JPEG, PNG, WebP, AVIF, HEIC, TIFF, GIF, BMP or PPM"

READ = (  # first bytes, and the name that Pillow has for the format
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "TIFF"),  # BigTIFF
    (b"MM\0+", "TIFF"),
    (b"P1", "PPM"),
    (b"P2", "PPM"),
    (b"P3", "PPM"),
    (b"P4", "PPM"),
    (b"P5", "PPM"),
    (b"P6", "PPM"),
    (b"Pf", "PPM"),
    (b"PyP", "PPM"),
    (b"PyRGBA", "PPM"),
    (b"PyCMYK", "PPM"),
)
NOT_READ = (  # first bytes, and what such a file is
    (b"\xff\x0a", "JPEG XL; convert it first, for example with djxl of libjxl"),
    (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL; convert it first, for example with djxl of libjxl"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (b"\0\0\0\x0cjP  \r\n\x87\n", "JPEG 2000"),
    (b"\xff\xd8", "the start of a JPEG"),
    (b"II\xbc", "JPEG XR"),
    (b"P7", "PAM"),
    (b"PF", "PFM of floating-point colors"),
    (b"8BPS", "a Photoshop document"),
    (b"DDS ", "a DDS texture"),
    (b"\0\0\1\0", "an icon"),
    (b"\0\0\2\0", "a cursor, or TGA"),
    (b"\0\0\x0a\0", "TGA"),
    (b"\0\1\1\0", "TGA"),
    (b"\0\0\3\0", "TGA"),
    (b"Image type:", "IM"),
    (b"#define", "XBM"),
    (b"/* XPM */", "XPM"),
    (b"icns", "an icon of macOS"),
    (b"qoif", "QOI"),
    (b"\x76\x2f\x31\x01", "OpenEXR"),
    (b"#?RADIANCE", "Radiance HDR"),
    (b"#?RGBE", "Radiance HDR"),
    (b"SIMPLE  =", "FITS"),
    (b"\x01\xda", "SGI"),
    (b"\x0a\x05\x01", "PCX"),
    (b"\x0a\x03\x01", "PCX"),
    (b"DanM", "Microsoft Paint"),
    (b"LinS", "Microsoft Paint"),
    (b"FLIF", "FLIF"),
    (b"BPG\xfb", "BPG"),
    (b"gimp xcf", "an image of GIMP"),
    (b"AT&TFORM", "DjVu"),
    (b"FUJIFILMCCD-RAW", "a raw photograph"),
    (b"IIRO", "a raw photograph"),
    (b"IIRS", "a raw photograph"),
    (b"IIU\0", "a raw photograph"),
    (b"\xd7\xcd\xc6\x9a", "a Windows metafile"),
    (b"%PDF", "a PDF"),
    (b"%!PS", "PostScript"),
    (b"\xc5\xd0\xd3\xc6", "PostScript"),
    (b"PK\x03\x04", "a zip archive"),
    (b"\x1f\x8b", "gzip"),
    (b"7z\xbc\xaf", "a 7z archive"),
    (b"Rar!", "a rar archive"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"\x1aE\xdf\xa3", "a video"),
    (b"ID3", "sound"),
    (b"OggS", "sound or a video"),
    (b"version https://git-lfs", "a pointer of Git LFS; fetch the file with git lfs pull"),
)
TEXT_STARTS = (  # in lower case, behind white space
    (b"<!doctype html", "a web page, not an image: the download failed"),
    (b"<html", "a web page, not an image: the download failed"),
    (b"<svg", "SVG, a drawing without pixels"),
    (b"<?xml", "XML"),
    (b"{", "JSON or other text"),
)
WHITE_SPACE = b"\xef\xbb\xbf \t\r\n"  # with the mark of UTF-8


def format_of(data: bytes) -> str:
    """Pillow's name of the format that the first bytes of a file tell.

    Raises: RecordRejected: not_an_image; the detail names the format, if it is a known one.
    """
    name = _name_of(data)
    if name:
        return name
    if data[4:8] == b"ftyp":
        return _format_of_box(data)
    raise RecordRejected("decode", "not_an_image", _description(data))


def _name_of(data: bytes) -> str:
    """Pillow's name of a format with a signature of its own; "" for others."""
    for start, name in READ:
        if data.startswith(start):
            return name
    return "WEBP" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else ""


def _format_of_box(data: bytes) -> str:
    """The format of an ISO base media file: images of HEIC or AVIF, or a video.

    A file whose first brand is general (mif1) may be either: AVIF is then among its compatible brands.
    """
    brand = data[8:12]
    if brand in AVIF_BRANDS:
        return "AVIF"
    if brand in HEIF_BRANDS:
        return "HEIF"
    detail = _unread("a raw photograph" if brand == b"crx " else "a video or another media file")
    raise RecordRejected("decode", "not_an_image", detail)


def may_be_avif(data: bytes) -> bool:
    """AVIF is among the compatible brands of a file whose first brand is HEIF's."""
    return any(brand in data[8:BRANDS_END] for brand in AVIF_BRANDS)


def _description(data: bytes) -> str:
    """What a file is whose format is not read."""
    if not data:
        return "the file is empty"
    if not data.strip(b"\0"):
        return f"all {len(data)} bytes are zero: the file was not completely written or downloaded"
    if data[-18:].startswith(b"TRUEVISION-XFILE"):
        return _unread("TGA")
    for start, name in NOT_READ:
        if data.startswith(start):
            return _unread(name)
    text = data[:256].lstrip(WHITE_SPACE).lower()
    for start, name in TEXT_STARTS:
        if text.startswith(start):
            return _unread(name)
    if data[:4] == b"RIFF":
        return _unread("sound or a video")
    if data[128:132] == b"DICM":
        return _unread("DICOM")
    behind = data.lstrip(WHITE_SPACE)
    if _name_of(behind):
        num_strays = len(data) - len(behind)
        return f"{_name_of(behind)} behind {num_strays} bytes of white space, which do not belong to it"
    return "no known image format"


def _unread(name: str) -> str:
    return f"it is {name}; expected {EXPECTED}"
