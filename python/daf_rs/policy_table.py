"""What backward reads of every tensor that autograd saves: the one table of the package.

A saved tensor is named by its *reader*: the autograd node that saved it (``node.name()``, for example
``"ReluBackward0"``) and the field of that node (``"result"``). `TABLE` maps the pair to a `Rule`, and the
hook layer encodes by the rule. Whatever the table does not name is read by an unknown reader and is kept
losslessly (`UNKNOWN`).

Three things decide a rule:

* **What is read.** Some saved values are never read (only their shape is), some are only compared with a
  constant, some are compared with another tensor, some are read as values.
* **How an error travels.** Dithered codes are unbiased, so a gradient that is *linear* in the saved value
  stays unbiased at any width. Where it is not linear the bias is of second order in the step, so those
  readers have a floor, or a fixed width, or are exact.
* **How much there is.** Statistics, indices and weights are small; they stay exact.

Every entry is checked against PyTorch by ``tests/test_policy.py``: the names against the
``derivatives.yaml`` that PyTorch ships, the claims by experiment.
"""

from __future__ import annotations

import math
from typing import Final

from .policy_rule import HUGE, TINY, Rule, step_up

__all__ = ["BOUNDARY", "TABLE", "UNKNOWN"]

UNKNOWN: Final = Rule("exact", why="its reader is unknown, so every bit may matter")
BOUNDARY: Final = Rule("value", bits=8, axis="producer", why="the input of a checkpointed region feeds a recompute")

TABLE: dict[tuple[str, str], Rule] = {}


def _add(rule: Rule, names: str) -> None:
    """Enters `rule` for every ``Node.field[,field…]`` of the whitespace-separated `names`."""
    for name in names.split():
        node, _, fields = name.partition(".")
        for field in fields.split(","):
            if (node, field) in TABLE:
                raise AssertionError(f"{node}.{field} is in the table twice")
            TABLE[node, field] = rule


# --- Never read: only the shape, the strides or the dtype is --------------------------------------------------

_add(
    Rule("unused", why="backward reads its shape only"),
    """
    MaxPool2DWithIndicesBackward0.self MaxPool3DWithIndicesBackward0.self
    AdaptiveMaxPool2DBackward0.self AdaptiveMaxPool3DBackward0.self
    FractionalMaxPool2DBackward0.self FractionalMaxPool3DBackward0.self
    AvgPool2DBackward0.self AvgPool3DBackward0.self
    AdaptiveAvgPool2DBackward0.self AdaptiveAvgPool3DBackward0.self
    ReflectionPad1DBackward0.self ReflectionPad2DBackward0.self ReflectionPad3DBackward0.self
    ReplicationPad1DBackward0.self ReplicationPad2DBackward0.self ReplicationPad3DBackward0.self
    NllLossBackward0.self NllLoss2DBackward0.self
    NativeLayerNormBackward0.bias
    GatherBackward0.self TakeBackward0.self MaskedSelectBackward0.self
    IndexAddBackward0.source IndexCopyBackward0.source
    CummaxBackward0.self CumminBackward0.self
    FftR2CBackward0.self
    """,
)

# --- Only compared with a constant: 1 or 2 bits, and exact -----------------------------------------------------

_BOUNDS = "backward compares it with the bounds only"

_add(Rule("mask", consts=(0.0,), why="backward reads x > 0 only"), "ReluBackward0.result")
_add(
    Rule("mask", attrs=("_saved_threshold",), why="backward compares it with the threshold only"),
    "ThresholdBackward0.self ThresholdBackward1.self",
)
# leaky_relu takes the negative branch for NaN, so this is no "mask". In training, rrelu reads the noise alone.
_add(
    Rule("within", consts=(TINY, math.inf), why="backward reads x > 0 only"),
    """
    LeakyReluBackward0.self LeakyReluBackward1.result
    RreluWithNoiseBackward0.self RreluWithNoiseBackward1.result RreluWithNoiseFunctionalBackward0.self
    """,
)
_add(Rule("sign", why="backward reads its sign only"), "AbsBackward0.self")
# For NaN PyTorch's CPU kernels of hardtanh and the shrinks differ between whole vectors and the tail; these
# rules follow the tail and CUDA.
_add(
    Rule("not_beyond", attrs=("_saved_min_val", "_saved_max_val"), why=_BOUNDS),
    "HardtanhBackward0.self",
)
_add(
    Rule("within", consts=(step_up(-3.0), -step_up(-3.0)), why="backward reads -3 < x < 3 only"),
    "HardsigmoidBackward0.self",
)
# `resolve` makes these "within"; how, depends on more than the attributes' values.
_add(Rule("exact", attrs=("_saved_lambd",), why=_BOUNDS), "HardshrinkBackward0.self SoftshrinkBackward0.self")
_add(Rule("exact", attrs=("_saved_min", "_saved_max"), why=_BOUNDS), "ClampBackward1.self")
_add(Rule("exact", attrs=("_saved_min", ""), why=_BOUNDS), "ClampMinBackward0.self")
_add(Rule("exact", attrs=("", "_saved_max"), why=_BOUNDS), "ClampMaxBackward0.self")
_add(Rule("within", consts=(-HUGE, HUGE), why="backward reads only whether it is finite"), "NanToNumBackward0.self")
_add(Rule("within", consts=(-math.inf, math.inf), why="backward reads only whether it is NaN"), "NansumBackward0.self")

# --- Compared with other tensors, indices, masks, statistics, random states, workspaces: exact ------------------

_add(
    Rule("exact", why="backward compares it with another tensor"),
    """
    ClampBackward0.self,min,max ClampMinBackward1.self,min ClampMaxBackward1.self,max
    MaximumBackward0.self,other MinimumBackward0.self,other FmaxBackward0.self,other FminBackward0.self,other
    MaxBackward1.self,result MinBackward1.self,result AmaxBackward0.self,result AminBackward0.self,result
    AminmaxBackward0.self,min,max MedianBackward0.self,result NanmedianBackward0.self,result
    ScatterReduceBackward0.self,index,src,result IndexReduceBackward0.self,index,source,result
    SegmentReduceBackward0.data,lengths,offsets,result
    ForeachMinimumBackward0.self ForeachMinimumBackward1.self
    ForeachMaximumBackward0.self ForeachMaximumBackward1.self
    MultiMarginLossBackward0.self,target,weight MultilabelMarginLossBackward0.self,target,is_target
    CopysignBackward0.self,result CopysignBackward1.self,result NextafterBackward0.self,other
    """,
)
_add(
    Rule("exact", why="an index or a mask"),
    """
    EmbeddingBackward0.indices EmbeddingBagBackward0.indices,offsets,result1,result2,result3
    IndexBackward0.indices UnsafeIndexBackward0.indices UnsafeMaskedIndexBackward0.mask,indices
    UnsafeMaskedIndexPutAccumulateBackward0.mask,indices
    IndexAddBackward0.index IndexCopyBackward0.index IndexFillBackward0.index IndexFillBackward1.index
    IndexPutBackward0.indices UnsafeIndexPutBackward0.indices IndexPutImplBackward0.indices
    IndexSelectBackward0.index GatherBackward0.index TakeBackward0.index PutBackward0.index,source
    ScatterBackward0.index ScatterBackward1.index ScatterAddBackward0.index
    MaskedFillBackward0.mask MaskedFillBackward1.mask MaskedScatterBackward0.mask MaskedSelectBackward0.mask
    WhereBackward0.condition
    SortBackward0.indices SortBackward1.indices TopkBackward0.indices KthvalueBackward0.indices ModeBackward0.indices
    MaxBackward0.indices MinBackward0.indices MedianBackward1.indices NanmedianBackward1.indices
    CummaxBackward0.indices CumminBackward0.indices
    MaxPool2DWithIndicesBackward0.result1 MaxPool3DWithIndicesBackward0.result1
    AdaptiveMaxPool2DBackward0.result1 AdaptiveMaxPool3DBackward0.result1
    FractionalMaxPool2DBackward0.result1 FractionalMaxPool3DBackward0.result1
    MaxUnpool2DBackward0.indices MaxUnpool3DBackward0.indices
    NativeDropoutBackward0.result1 FusedDropoutBackward0.result1
    FakeQuantizePerTensorAffineCachemaskBackward0.mask FakeQuantizePerChannelAffineCachemaskBackward0.mask
    FakeQuantizePerTensorAffineCachemaskTensorQparamsBackward0.mask FusedMovingAvgObsFqHelperBackward0.mask
    NllLossBackward0.target,weight,total_weight NllLoss2DBackward0.target,weight,total_weight
    PackPaddedSequenceBackward0.result1 GroupedMmBackward0.offs FrexpBackward0.exponent
    """,
)
_add(
    Rule("exact", why="a saved statistic: small, and its error would reach every element"),
    """
    NativeBatchNormBackward0.running_mean,running_var,result1,result2
    NativeBatchNormLegitBackward0.running_mean,running_var,result1,result2
    NativeBatchNormLegitBackward1.result1,result2
    NativeBatchNormLegitNoTrainingBackward0.running_mean,running_var,result1,result2
    BatchNormWithUpdateBackward0.running_mean,running_var,result1,result2,result3
    BatchNormNoUpdateBackward0.running_mean,running_var,result1,result2,result3
    CudnnBatchNormBackward0.running_mean,running_var,result1,result2,result3
    MiopenBatchNormBackward0.running_mean,running_var,result1,result2
    NativeLayerNormBackward0.result1,result2 NativeGroupNormBackward0.result1,result2 FusedRmsNormBackward0.result1
    WeightNormInterfaceBackward0.result1
    LogsumexpBackward0.result StdBackward0.result StdMeanBackward0.result0
    NormBackward0.result NormBackward1.result NormBackward2.result NormBackward3.result
    LinalgVectorNormBackward0.result ForeachNormBackward0.self,result
    ScaledDotProductFlashAttentionForCpuBackward0.logsumexp,attn_mask
    ScaledDotProductFlashAttentionBackward0.logsumexp,cum_seq_q,cum_seq_k,rng_state,unused
    ScaledDotProductEfficientAttentionBackward0.log_sumexp,attn_bias,philox_seed,philox_offset
    ScaledDotProductCudnnAttentionBackward0.logsumexp,attn_bias,cum_seq_q,cum_seq_k,philox_seed,philox_offset
    ScaledDotProductFusedAttentionOverrideableBackward0.logsumexp,attn_bias,cum_seq_q,cum_seq_k
    ScaledDotProductFusedAttentionOverrideableBackward0.philox_seed,philox_offset
    FlashAttentionBackward0.softmax_logsumexp,cum_seq_q,cum_seq_k,rng_state,unused
    EfficientAttentionBackward0.logsumexp,bias,cu_seqlens_q,cu_seqlens_k,philox_seed,philox_offset
    CudnnAttentionBackward0.logsumexp,attn_bias,cum_seq_q,cum_seq_k,philox_seed,philox_offset
    """,
)
_add(
    Rule("exact", why="a workspace or state that only its own kernel can read"),
    """
    MkldnnRnnLayerBackward0.hx_,cx_,result1,result2,result3
    CudnnRnnBackward0.hx,cx,dropout_state,result3,result4 MiopenRnnBackward0.hx,cx,dropout_state,result3,result4
    LstmMpsBackward0.hx,result3,result4,result5
    ThnnFusedLstmCellBackward0.input_gates,hidden_gates,cx,result1,result2
    ThnnFusedGruCellBackward0.input_gates,hidden_gates,hx,result1
    CtcLossBackward0.log_probs,targets,result0,result1
    CtcLossBackward1.log_probs,targets,input_lengths,target_lengths,result0,result1
    CudnnCtcLossBackward0.result0,result1 CudnnCtcLossBackward1.result0,result1
    RreluWithNoiseBackward0.noise RreluWithNoiseBackward1.noise RreluWithNoiseFunctionalBackward0.noise
    """,
)
_add(
    Rule("exact", why="a weight: its error would reach the gradient of the layer's input"),
    """
    ConvolutionBackward0.weight ConvolutionBackward1.weight ConvolutionOverrideableBackward0.weight
    SlowConv2DBackward0.weight SlowConv3DBackward0.weight SlowConvDilated2DBackward0.weight
    SlowConvDilated3DBackward0.weight SlowConvTranspose2DBackward0.weight SlowConvTranspose3DBackward0.weight
    ConvDepthwise2DBackward0.weight ConvDepthwise3DBackward0.weight ConvTbcBackward0.weight,bias
    CudnnConvolutionBackward0.weight CudnnConvolutionTransposeBackward0.weight
    MiopenConvolutionBackward0.weight MiopenConvolutionTransposeBackward0.weight
    MiopenDepthwiseConvolutionBackward0.weight MkldnnConvolutionBackward0.weight
    MpsConvolutionBackward0.weight MpsConvolutionTransposeBackward0.weight NnpackSpatialConvolutionBackward0.weight
    LinearBackward0.weight MkldnnLinearBackward0.weight AddmmBackward0.mat2
    NativeLayerNormBackward0.weight NativeGroupNormBackward0.weight FusedRmsNormBackward0.weight
    NativeBatchNormBackward0.weight NativeBatchNormLegitBackward0.weight NativeBatchNormLegitBackward1.weight
    NativeBatchNormLegitNoTrainingBackward0.weight BatchNormWithUpdateBackward0.weight
    BatchNormNoUpdateBackward0.weight CudnnBatchNormBackward0.weight MiopenBatchNormBackward0.weight
    MkldnnRnnLayerBackward0.weight0,weight1,weight2,weight3 CudnnRnnBackward0.weight MiopenRnnBackward0.weight
    LstmMpsBackward0.params ThnnFusedLstmCellBackward0.input_bias,hidden_bias
    ThnnFusedGruCellBackward0.input_bias,hidden_bias
    PreluKernelBackward0.weight WeightNormInterfaceBackward0.v,g EmbeddingBagBackward0.weight,per_sample_weights
    BinaryCrossEntropyBackward0.weight BinaryCrossEntropyWithLogitsBackward0.weight,pos_weight
    FakeQuantizeLearnablePerTensorAffineBackward0.self,scale,zero_point
    FakeQuantizeLearnablePerChannelAffineBackward0.self,scale,zero_point
    """,
)

# --- Functions with a pole or an exponential: a small absolute error is a large relative one --------------------

_add(
    Rule("exact", why="backward divides by it or takes a power of it: a small error near 0 would be a large one"),
    """
    DivBackward0.other DivBackward2.self,other AddcdivBackward0.tensor2 ReciprocalBackward0.result
    ForeachDivBackward0.self,other
    LogBackward0.self Log2Backward0.self Log10Backward0.self Log1PBackward0.self
    SqrtBackward0.result RsqrtBackward0.result TanBackward0.result
    PowBackward1.self,exponent,result PowBackward2.exponent,result
    ForeachPowBackward0.self,exponent,result ForeachPowBackward1.self ForeachPowBackward2.exponent,result
    AcosBackward0.self AsinBackward0.self AcoshBackward0.self AtanhBackward0.self Atan2Backward0.self,other
    AngleBackward0.self HypotBackward0.self,other,result LogitBackward0.self ErfinvBackward0.self
    XlogyBackward0.self,other XlogyBackward1.other XlogyBackward2.self
    SpecialXlog1PyBackward0.self,other SpecialXlog1PyBackward1.other SpecialXlog1PyBackward2.self
    SpecialEntrBackward0.self LgammaBackward0.self DigammaBackward0.self MvlgammaBackward0.self
    PolygammaBackward0.self PolygammaBackward1.self IgammaBackward0.self,other IgammacBackward0.self,other
    StandardGammaBackward0.self,result
    ProdBackward0.self,result ProdBackward1.self,result CumprodBackward0.self,result
    DistBackward0.self,other,result PdistBackward0.self,result
    CdistBackward0.x1,x2,result EuclideanDistBackward0.x1,x2,result
    FmodBackward1.self,other RemainderBackward1.self,other RenormBackward0.self
    BinaryCrossEntropyBackward0.self,target
    """,
)
_add(
    Rule(
        "exact", why="an exponential: its values span orders of magnitude, and backward may weigh the small ones most"
    ),
    """
    ExpBackward0.result Exp2Backward0.result Expm1Backward0.result SinhBackward0.self CoshBackward0.self
    LogcumsumexpBackward0.self,result LogaddexpBackward0.self,other Logaddexp2Backward0.self,other
    LdexpBackward0.other,result
    I0Backward0.self SpecialI0EBackward0.self,result SpecialI1Backward0.self,result SpecialI1EBackward0.self,result
    SpecialErfcxBackward0.self,result SpecialLogNdtrBackward0.self,result SpecialNdtriBackward0.result
    """,
)
_add(
    Rule("exact", why="a sampling position: an error moves the samples"),
    "GridSampler2DBackward0.grid GridSampler3DBackward0.grid GridSampler2DCpuFallbackBackward0.grid "
    "CudnnGridSamplerBackward0.grid",
)
_add(
    Rule("exact", why="backward solves with it or takes a factorization apart"),
    """
    CholeskyBackward0.result LinalgCholeskyExBackward0.L
    CholeskySolveBackward0.self,input2,result CholeskyInverseBackward0.self,result
    LinalgDetBackward0.A,result,LU,pivots LinalgSlogdetBackward0.A,sign,LU,pivots LinalgInvExBackward0.inverse
    LinalgPinvBackward0.self,result LinalgLstsqBackward0.self,b,solution LinalgLuFactorExBackward0.LU,pivots
    LinalgLuBackward0.P,L,U LinalgLuSolveBackward0.LU,pivots,result LinalgMatrixExpBackward0.self
    LinalgMatrixSqrthBackward0.self LinalgPolarBackward0.A,U,H LinalgQrBackward0.Q,R LinalgSvdBackward0.U,S,Vh
    LinalgEighBackward0.eigenvalues,eigenvectors LinalgEigBackward0.eigenvalues,eigenvectors
    LinalgSolveExBackward0.A,result,LU,pivots TriangularSolveBackward0.self,A,solution
    LinalgSolveTriangularBackward0.self,result LinalgHouseholderProductBackward0.input,tau,result
    OrmqrBackward0.self,input2,input3,result
    """,
)

# --- Values whose gradient is linear in them: unbiased at any width ---------------------------------------------

_add(
    Rule("value", axis="last", why="the gradient of the weight is linear in it"),
    "AddmmBackward0.mat1 LinearBackward0.input MkldnnLinearBackward0.self",
)
_add(
    Rule("value", axis="dim1", why="the gradient of the weight is linear in it"),
    """
    ConvolutionBackward0.input ConvolutionBackward1.input ConvolutionOverrideableBackward0.input
    SlowConv2DBackward0.self SlowConv3DBackward0.self SlowConvDilated2DBackward0.self SlowConvDilated3DBackward0.self
    SlowConvTranspose2DBackward0.self SlowConvTranspose3DBackward0.self
    ConvDepthwise2DBackward0.self ConvDepthwise3DBackward0.self
    CudnnConvolutionBackward0.self CudnnConvolutionTransposeBackward0.self
    MiopenConvolutionBackward0.self MiopenConvolutionTransposeBackward0.self MiopenDepthwiseConvolutionBackward0.self
    MkldnnConvolutionBackward0.self MpsConvolutionBackward0.self MpsConvolutionTransposeBackward0.self
    NnpackSpatialConvolutionBackward0.input
    """,
)
_add(Rule("value", axis="last", why="the gradient of the weight is linear in it"), "ConvTbcBackward0.self")
_add(
    Rule(
        "value",
        plus=2,
        axis="last",
        guard="bmm",
        why="perhaps the scores of an attention: two bits more where both operands are activations",
    ),
    """
    BmmBackward0.self,mat2 MmBackward0.self,mat2 MatmulBackward0.self,other
    BaddbmmBackward0.batch1,batch2 AddbmmBackward0.batch1,batch2
    GroupedMmBackward0.self,mat2 ForeachMmBackward0.self,mat2
    """,
)
_add(
    Rule("value", axis="last", why="the product's gradients are linear in it"),
    """
    MvBackward0.self,vec AddmvBackward0.mat,vec AddrBackward0.vec1,vec2 DotBackward0.self,tensor
    VdotBackward0.self,other TrilinearBackward0.i1,i2,i3
    """,
)
_add(
    Rule("value", axis="producer", why="the gradient is linear in it"),
    """
    MulBackward0.self,other AddcmulBackward0.tensor1,tensor2 AddcdivBackward0.tensor1 DivBackward0.self
    LinalgCrossBackward0.self,other LerpBackward1.weight,self,end
    MseLossBackward0.self,target BinaryCrossEntropyWithLogitsBackward0.target
    """,
)
_add(
    Rule("value", axis="row", why="the gradient is linear in it"),
    "VarBackward0.self VarMeanBackward0.self StdBackward0.self StdMeanBackward0.self",
)
_add(
    Rule("value", axis="dim1", why="the gradients are linear in it"),
    """
    GridSampler2DBackward0.input GridSampler3DBackward0.input GridSampler2DCpuFallbackBackward0.input
    CudnnGridSamplerBackward0.self
    """,
)
_add(
    Rule("value", axis="row", why="the gradient is linear in the normalized input; mean and rstd are exact"),
    "NativeLayerNormBackward0.input FusedRmsNormBackward0.input",
)
_add(
    Rule("value", axis="dim1", why="the gradient is linear in the normalized input; mean and rstd are exact"),
    """
    NativeBatchNormBackward0.input NativeBatchNormLegitBackward0.input NativeBatchNormLegitBackward1.input
    NativeBatchNormLegitNoTrainingBackward0.input BatchNormWithUpdateBackward0.input
    BatchNormNoUpdateBackward0.input CudnnBatchNormBackward0.input MiopenBatchNormBackward0.input
    NativeGroupNormBackward0.input
    """,
)
# x ** n for a whole n >= 2 (`resolve` looks); any other exponent has a pole or a kink at 0.
_add(
    Rule("exact", attrs=("_saved_exponent",), why="backward takes a power of it that may have a pole at 0"),
    "PowBackward0.self",
)
# The 2-norm's gradient is x / |x|, linear in x; other norms compare or take powers.
_add(
    Rule("exact", attrs=("_saved_ord",), why="backward takes a power of it, or compares it with the norm"),
    "LinalgVectorNormBackward0.self",
)
_add(
    Rule("exact", attrs=("_saved_p",), why="backward takes a power of it, or compares it with the norm"),
    "NormBackward0.self NormBackward1.self NormBackward2.self NormBackward3.self",
)

# --- Smooth but not linear: the bias is of second order in the step, so there is a least width ------------------

_add(
    Rule("value", floor=3, axis="producer", why="backward takes a smooth derivative at it"),
    """
    GeluBackward0.self SiluBackward0.self MishBackward0.self SoftplusBackward0.self HardswishBackward0.self
    CeluBackward0.self CeluBackward1.result GluBackward0.self
    LogSigmoidBackward0.self,buffer
    SigmoidBackward0.result TanhBackward0.result
    ErfBackward0.self ErfcBackward0.self AtanBackward0.self AsinhBackward0.self
    BinaryCrossEntropyWithLogitsBackward0.self SoftMarginLossBackward0.self
    SmoothL1LossBackward0.self,target HuberLossBackward0.self,target
    """,
)
# SELU's derivative jumps at 0 (alpha * input_scale is not 1); ELU's does not, and `resolve` gives it 3 bits.
_add(
    Rule(
        "value",
        bits=8,
        axis="producer",
        attrs=("_saved_alpha", "_saved_input_scale"),
        why="backward takes a derivative at it that jumps at 0",
    ),
    "EluBackward0.self EluBackward1.result",
)
_add(Rule("exact", why="holds the classes, 1 and -1"), "SoftMarginLossBackward0.target")
_add(
    Rule("value", bits=8, axis="producer", why="periodic: the step must stay far below the period"),
    "SinBackward0.self CosBackward0.self SincBackward0.self",
)
_add(
    Rule("value", bits=8, axis="producer", why="its sign chooses the branch, and its value gives the slope's gradient"),
    "PreluKernelBackward0.self",
)
_add(
    Rule("value", bits=8, axis="row", why="probabilities: most are near 0, and all are multiplied by their sum"),
    """
    SoftmaxBackward0.result SafeSoftmaxBackward0.result MaskedSoftmaxBackward0.result
    LogSoftmaxBackward0.result LogsumexpBackward0.self
    """,
)
_add(Rule("exact", why="an index or a mask"), "MaskedSoftmaxBackward0.mask")

# --- Attention ---------------------------------------------------------------------------------------------------

_ATTENTION = (
    "ScaledDotProductFlashAttentionForCpuBackward0",
    "ScaledDotProductFlashAttentionBackward0",
    "ScaledDotProductEfficientAttentionBackward0",
    "ScaledDotProductCudnnAttentionBackward0",
    "ScaledDotProductFusedAttentionOverrideableBackward0",
    "FlashAttentionBackward0",
    "EfficientAttentionBackward0",
    "CudnnAttentionBackward0",
)
for _node in _ATTENTION:
    _add(
        Rule("value", plus=2, axis="heads", guard="q", why="its error goes through an exponential"),
        f"{_node}.query",
    )
    _add(
        Rule("value", plus=2, axis="heads", guard="k", why="its error goes through an exponential"),
        f"{_node}.key",
    )
    _add(Rule("value", axis="heads", why="the gradients are linear in it"), f"{_node}.value,output")

# --- Recurrent layers --------------------------------------------------------------------------------------------

_add(
    Rule("value", axis="last", why="the gradient of the weights is linear in it"),
    "MkldnnRnnLayerBackward0.input,result0 CudnnRnnBackward0.input MiopenRnnBackward0.input LstmMpsBackward0.input",
)
# Other kernels may also take the gates' derivatives from their outputs.
_add(
    Rule("exact", why="hidden states that the gates' derivatives may be taken from"),
    "CudnnRnnBackward0.result0 MiopenRnnBackward0.result0",
)
