#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
# sbatch slurm.sh train.py: a torchrun on each node, a process for each GPU.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun torchrun --nnodes "$SLURM_NNODES" \
  --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" \
  --rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d \
  --rdzv-endpoint "$first:${MASTER_PORT:-29500}" "$@"
