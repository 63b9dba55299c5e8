"""Number formats that keep matrices packed: arrays of codes and scales, to be computed with as they are."""

from pallas_kernels.formats.error import QuantisationError as QuantisationError
from pallas_kernels.formats.error import quantisation_error as quantisation_error
from pallas_kernels.formats.fp8 import Fp8Array as Fp8Array
from pallas_kernels.formats.nvfp4 import Nvfp4Array as Nvfp4Array
from pallas_kernels.formats.quantised import Quantised as Quantised
from pallas_kernels.formats.quantize import FORMATS as FORMATS
from pallas_kernels.formats.quantize import abstract as abstract
from pallas_kernels.formats.quantize import quantize as quantize
from pallas_kernels.formats.reference import to_float64 as to_float64
