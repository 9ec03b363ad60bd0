export MODEL_NAME="models/Diffusion_Transformer/Wan2.1-Fun-V1.1-14B-InP"

accelerate launch --mixed_precision="bf16" \
  --use_fsdp \
  --fsdp_auto_wrap_policy "TRANSFORMER_BASED_WRAP" \
  --fsdp_transformer_layer_cls_to_wrap "WanAttentionBlock" \
  --fsdp_sharding_strategy "FULL_SHARD" \
  --fsdp_state_dict_type "SHARDED_STATE_DICT" \
  --fsdp_backward_prefetch "BACKWARD_PRE" \
  scripts/wan2.1_fun/train.py \
  --config_path "config/wan2.1/wan_civitai.yaml" \
  --pretrained_model_name_or_path $MODEL_NAME \
  --train_data_dir $DATASET_NAME \
  --train_data_meta $DATASET_META_NAME \
  --trainable_modules "." \
  --image_sample_size=512 \
  --video_sample_size=512 \
  --token_sample_size=512 \
  --video_sample_n_frames=49 \
  --train_batch_size=1 \
  --gradient_accumulation_steps=4 \
  --dataloader_num_workers=8 \
  --num_train_epochs=100 \
  --learning_rate=2e-5 \
  --mixed_precision="bf16" \
  --allow_tf32 \
  --gradient_checkpointing \
  --low_vram \
  --enable_bucket \
  --uniform_sampling \
  --abnormal_norm_clip_start=100 \
  --lr_scheduler="cosine_with_restarts" \
  --lr_warmup_steps=500
