"""vLLM's classes that signatures here name. Imported under TYPE_CHECKING only: nothing of it is needed at run time."""

from __future__ import annotations

from vllm.config import KVTransferConfig as KVTransferConfig
from vllm.config import LoRAConfig as LoRAConfig
from vllm.config import ModelConfig as ModelConfig
from vllm.config import SchedulerConfig as SchedulerConfig
from vllm.config import VllmConfig as VllmConfig
from vllm.distributed.kv_events import KVCacheEvent as KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata as KVConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics as KVConnectorPromMetrics
from vllm.forward_context import ForwardContext as ForwardContext
from vllm.lora.request import LoRARequest as LoRARequest
from vllm.v1.core.kv_cache_manager import KVCacheBlocks as KVCacheBlocks
from vllm.v1.core.kv_cache_manager import KVCacheManager as KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput as SchedulerOutput
from vllm.v1.engine import EngineCoreRequest as EngineCoreRequest
from vllm.v1.engine.core import EngineCore as EngineCore
from vllm.v1.kv_cache_interface import KVCacheConfig as KVCacheConfig
from vllm.v1.kv_cache_interface import KVCacheGroupSpec as KVCacheGroupSpec
from vllm.v1.kv_cache_interface import KVCacheSpec as KVCacheSpec
from vllm.v1.outputs import KVConnectorOutput as KVConnectorOutput
from vllm.v1.request import Request as Request
