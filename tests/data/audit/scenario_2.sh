export MODEL_NAME="models/Diffusion_Transformer/Wan2.1-Fun-V1.1-14B-InP"

accelerate launch --mixed_precision="bf16" \
  --use_deepspeed --deepspeed_config_file config/zero_stage2_config.json \
  scripts/wan2.1_fun/train_lora.py \
  --config_path "config/wan2.1/wan_civitai.yaml" \
  --pretrained_model_name_or_path $MODEL_NAME \
  --train_data_dir $DATASET_NAME \
  --train_data_meta $DATASET_META_NAME \
  --image_sample_size=1024 \
  --video_sample_size=512 \
  --token_sample_size=512 \
  --video_sample_n_frames=81 \
  --train_batch_size=1 \
  --gradient_accumulation_steps=2 \
  --dataloader_num_workers=8 \
  --num_train_epochs=100 \
  --learning_rate=1e-4 \
  --rank=128 \
  --network_alpha=64 \
  --train_mode="inpaint" \
  --target_name="q,k,v,ffn.0,ffn.2" \
  --mixed_precision="bf16" \
  --allow_tf32 \
  --gradient_checkpointing \
  --low_vram \
  --enable_bucket \
  --auto_tile_batch_size \
  --uniform_sampling \
  --abnormal_norm_clip_start=100 \
  --lr_scheduler="cosine_with_restarts" \
  --lr_warmup_steps=200
