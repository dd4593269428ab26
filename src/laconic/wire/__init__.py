"""How it is written, without loss: index codecs and frames."""

from laconic.wire.bitmap import Bitmap
from laconic.wire.elias_fano import EliasFano
from laconic.wire.frame import CodesShape, Contents, FrameShape, ValueCode, ValueCodec, bucket_of, longest_frame
from laconic.wire.implied import Implied
from laconic.wire.index_codec import INDEX_CODECS, IndexBlock, IndexCodec, floor_bits, smallest_index_codec
from laconic.wire.rice import Rice
from laconic.wire.runs import Runs
from laconic.wire.several import read_answers, read_each, write_each, write_parts
