export MODEL_NAME="models/Diffusion_Transformer/Wan2.1-Fun-V1.1-1.3B-InP"
export DATASET_NAME="datasets/internal_datasets/"
export DATASET_META_NAME="datasets/internal_datasets/metadata.json"

accelerate launch --mixed_precision="bf16" scripts/wan2.1_fun/train_lora.py \
  --config_path "config/wan2.1/wan_civitai.yaml" \
  --pretrained_model_name_or_path $MODEL_NAME \
  --train_data_dir $DATASET_NAME \
  --train_data_meta $DATASET_META_NAME \
  --image_sample_size=512 \
  --video_sample_size=512 \
  --token_sample_size=512 \
  --video_sample_n_frames=49 \
  --train_batch_size=1 \
  --gradient_accumulation_steps=4 \
  --dataloader_num_workers=4 \
  --num_train_epochs=100 \
  --learning_rate=1e-4 \
  --rank=64 \
  --network_alpha=32 \
  --train_mode="inpaint" \
  --target_name="q,k,v,ffn.0,ffn.2" \
  --mixed_precision="bf16" \
  --allow_tf32 \
  --gradient_checkpointing \
  --low_vram \
  --enable_bucket \
  --use_8bit_adam \
  --lr_scheduler="cosine_with_restarts" \
  --lr_warmup_steps=100
