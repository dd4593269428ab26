"""Messages are written without loss: index codecs and frames."""

from laconic.wire.frame import (
    CodesShape,
    Contents,
    FrameShape,
    ValueCode,
    ValueCodec,
    bucket_of,
    count_in,
    longest_frame,
)
from laconic.wire.frame_batch import read_answers, read_each, write_each, write_parts
from laconic.wire.index_codec import (
    INDEX_CODECS,
    Bitmap,
    EliasFano,
    Implied,
    IndexBlock,
    IndexCodec,
    Rice,
    Runs,
    floor_bits,
    smallest_index_codec,
)
