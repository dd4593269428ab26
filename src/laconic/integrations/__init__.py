"""What users of Accelerate, Lightning and Transformers import: one file each."""
